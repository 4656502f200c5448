"""Ops that padded programs are made with: masks and moments of valid rows, running statistics, checks of bounds."""
