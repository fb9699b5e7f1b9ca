"""Tests, laid out like the library."""
