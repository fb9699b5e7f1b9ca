"""The objectives: terms over groups of sites, and gradients through gates."""
