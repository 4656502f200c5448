"""Passes by algebra: whether to aggregate or to multiply first, factors of rows."""
