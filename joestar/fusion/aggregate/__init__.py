"""Passes around sums over in-edges: what goes into them, what comes out, their gradients' forms."""
