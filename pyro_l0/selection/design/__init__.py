"""The way from data in their own units to a problem, by steps, each of which is applied and undone."""
