"""Passes over values of edges: attention, edge programs, scatters."""
