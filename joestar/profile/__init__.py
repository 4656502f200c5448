"""Measurement: size recorder, bounds, the ledger and its views."""
