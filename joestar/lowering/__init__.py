"""Capture into one FX graph, its rules and verifier, keyed dropout, sizes and padding."""

import joestar.ops  # noqa: F401  (registers the ops whose names the modules here look up)
