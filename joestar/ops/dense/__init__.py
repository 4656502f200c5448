"""Ops on rows: products, biases, dropout, reads of tables."""
