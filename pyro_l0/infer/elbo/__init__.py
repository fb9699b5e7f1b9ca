"""The objectives: terms over blocks of sites, and gradients through gates."""
