"""Ops and kernels around the program of a training step."""
