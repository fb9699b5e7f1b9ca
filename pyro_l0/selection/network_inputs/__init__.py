"""How the inputs are chosen that a network needs."""
