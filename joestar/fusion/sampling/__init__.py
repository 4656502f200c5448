"""Passes over sampling and what reads samples at once."""
