"""Budgets that the deterministic network keeps to."""
