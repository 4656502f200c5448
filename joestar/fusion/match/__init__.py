"""What passes share: matching and emitting nodes, gathers."""
