"""Pure tensor maths of gates: no state, no Pyro, float32-safe, fit for ``torch.compile``.

A module per family, imported as a module: ``hard_concrete.log_probs(...)``. Names without an underscore are what others
use. ``docs/lab/derivations.md`` derives the formulas; the comments here say which
cancellation or overflow a form avoids.
"""
