"""Passes over rows: biases, activations, joined and narrow products."""
