"""One class per kind of mistake. Every message says what was expected, what came, where, and what to do."""

import sys
import warnings


class JoestarError(Exception):
    """Base of all errors that Joestar raises on purpose."""


class GraphError(JoestarError, ValueError):
    """A graph, or data attached to it, is malformed."""


class SeedError(JoestarError, ValueError):
    """Seeds (the nodes of a mini-batch) are unusable."""


class SamplerError(JoestarError, ValueError):
    """A sampler was configured with impossible values, or returned something other than blocks."""


class CaptureError(JoestarError):
    """Sampling and model could not be captured as one graph."""


class PaddingError(JoestarError):
    """An operation of the model has no correct form on padded rows."""


class VerificationError(JoestarError):
    """A pass left a graph that breaks the rules of the IR: a defect of the pass, not of the user's program."""


class ChangedAfterCompileError(JoestarError):
    """Something that the compiled step holds on to was changed or replaced."""


class StaleBackwardError(JoestarError, RuntimeError):
    """A backward pass came too late: what it needs has been overwritten by a later call."""


class GradientError(JoestarError, RuntimeError):
    """A derivative that an op does not have was asked for: a second one, or one in forward mode or by torch.func."""


class OptimizerError(JoestarError, ValueError):
    """The optimizer is unknown to the compiled step, or does not fit the model."""


class LabelError(JoestarError, ValueError):
    """Labels are missing, of the wrong shape or dtype, or out of range."""


class DomainError(JoestarError, ValueError, RuntimeError):
    """A value that a model computed lies outside of what a loss or a distribution takes."""


class ConfigError(JoestarError, ValueError):
    """An option has an unknown name or an impossible value."""


class DataError(JoestarError, ValueError):
    """A dataset is missing or malformed on disk."""


class CheckpointError(JoestarError, ValueError):
    """A checkpoint is missing, damaged, or of another run."""


class StageError(JoestarError, RuntimeError):
    """A thread that makes data ready for training failed, or is gone; the cause is what it raised."""


class DistributedError(JoestarError, RuntimeError):
    """Ranks of a job differ, are at different calls, or one of them failed; it says which, and why."""


class JoestarWarning(UserWarning):
    """Something is slower than it could be, or other than one might think; the result is right."""


_NOT_THE_USERS = ("joestar", "torch.utils._contextlib")
"""Modules, by what their names begin with, whose lines no warning should name: ours, and PyTorch's decorators."""


def say(text: str) -> None:
    """Warns at the user's line, once for the same line and text (see Python's ``warnings`` on how to silence it)."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, JoestarWarning, stacklevel=level)
