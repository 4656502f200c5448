"""Benchmarks behind ``joestar bench``: planted graphs, an expert-eager baseline, and measured steps."""
