"""Passes over Inductor's own graphs."""
