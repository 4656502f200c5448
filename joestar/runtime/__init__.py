"""The machine: programs, executor, training step, optimizer, prediction, guards."""
