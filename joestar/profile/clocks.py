"""The clocks and counters of a run: what belongs to every step, and what happens once, compiling above all."""

from joestar.profile.ledger import FIRST_BACKWARD, Report

ONCE = {
    "prepare": "tracing, passes, choosing bounds, compiling the forward pass",
    FIRST_BACKWARD: "first backward pass, compiling included",
    "capture": "capturing the CUDA graph",
    "tuning": "timing of choices",
}
"""Clocks that are no time of steps, and what they are."""


def clocks(report: Report) -> list[tuple[str, float, float]]:
    """(phase, seconds, milliseconds per step) of the steps."""
    steps, found = max(report.counters.steps, 1), report.counters.seconds.items()
    return [(name, seconds, seconds / steps * 1e3) for name, seconds in found if name not in ONCE]


def once(report: Report) -> list[tuple[str, float]]:
    """(what, seconds) of everything that happens once per program, not per step."""
    return [(ONCE[name], seconds) for name, seconds in report.counters.seconds.items() if name in ONCE]


def events(report: Report) -> list[tuple[str, int]]:
    """(what, how often)."""
    counters = report.counters
    return [
        ("steps", counters.steps), ("padded", counters.padded_steps), ("exact", counters.exact_steps),
        ("overflows", counters.overflows), ("fallbacks", counters.fallbacks), ("recompiles", counters.recompiles),
        ("CUDA graphs captured", counters.captures), ("warm-up batches", counters.warm_up_batches),
    ]  # fmt: skip
