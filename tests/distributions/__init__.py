"""Tests of the gate distributions and of their KL divergences."""
