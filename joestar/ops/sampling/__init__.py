"""Ops that make or read structure: picks, slices, local ids, self-loops, rows of edges."""
