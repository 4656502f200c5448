"""Capture into one FX graph, its verifier, keyed dropout, sizes, padding and its rules."""
