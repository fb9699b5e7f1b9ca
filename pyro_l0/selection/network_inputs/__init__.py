"""Selection of a network's inputs."""
