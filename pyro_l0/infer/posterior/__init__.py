"""Fitting a guide, checking it, sampling without one, and what is read off the draws."""
