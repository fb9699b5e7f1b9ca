"""Posteriors of gates, slabs and other latent variables."""
