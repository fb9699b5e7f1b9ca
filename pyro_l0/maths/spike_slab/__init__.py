"""Binary gates in front of Gaussian slabs: the slabs integrated out, modes, expansions and chains of gates."""
