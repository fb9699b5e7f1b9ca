"""Budgets over L0Gates in the loops of other libraries, a file for each, which imports that library."""
