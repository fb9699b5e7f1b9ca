"""Weights and multiply-adds as functions of the gates, and squared norms of the weights behind them."""
