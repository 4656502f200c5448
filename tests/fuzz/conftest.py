"""Captures are made here as in the tests of lowering."""

from lowering.conftest import quiet  # noqa: F401  (a fixture)
