"""Callbacks that keep L0Gates to a budget in the training loops of other libraries, a module for each library."""
