"""Machine level: programs, executor, training step, optimizer, prediction, guards."""

import joestar.ops  # noqa: F401  (registers the ops whose names the modules here look up)
