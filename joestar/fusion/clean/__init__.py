"""Passes that take away: dead, equal, trivial and constant values."""
