"""Passes that read tables of features in place."""
