"""Ops over the edges of a structure: sums, extrema and attention over in-edges, values of edges."""
