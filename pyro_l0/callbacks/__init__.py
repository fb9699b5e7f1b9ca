"""Callbacks that keep L0Gates to a budget in the training loops of other libraries, a module for each library."""

from pyro_l0.callbacks.budget import NetworkBudget as NetworkBudget
