"""The ledger in a few lines, for the end of ``joestar train``."""

from joestar.profile.ledger import ProgramRecord, Report
from joestar.profile.numbers import digits

HOUSEKEEPING = ("dce", "cse", "dce-after")


def short_report(report: Report) -> list[str]:
    """How the steps ran, and per program what was rewritten, how much is padding, and what compiling took."""
    counters = report.counters
    steps = f"{counters.steps} training steps: {counters.padded_steps} padded, {counters.exact_steps} exact; "
    steps += f"{counters.overflows} overflows, {counters.recompiles} recompilations"
    return [steps, *_planned(report), *(line for program in report.programs for line in _program_lines(program))]


def _planned(report: Report) -> list[str]:
    """What was planned under ``--memory`` beside what came of it."""
    found = [] if report.feeding is None else report.feeding.epoch
    return [f"{row.what}: planned {digits(row.planned)}, measured {digits(row.measured)}" for row in found]


def _program_lines(program: ProgramRecord) -> list[str]:
    fired = [f"{row.name} {row.rewrites}x" for row in program.passes if row.rewrites and row.name not in HOUSEKEEPING]
    wasted = [row.waste for row in program.sets if row.waste is not None]
    padding = f"padding up to {max(wasted):.0%}; " if wasted else ""
    seconds = sum(program.seconds.values())
    first = f"program {program.kind!r}: {', '.join(fired) or 'nothing fused'}"
    return [first, f"  {padding}made in {seconds:.1f} s"]
