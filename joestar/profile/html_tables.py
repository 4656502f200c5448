"""Rows and charts of the page that show sizes, choices and passes."""

from dataclasses import dataclass

from markupsafe import Markup

from joestar.profile import numbers
from joestar.profile.charts import Box, LinearAxis, LogAxis, Mark, chart
from joestar.profile.ledger import (
    CandidateRecord,
    PassSummary,
    ProgramRecord,
    SetRecord,
    TuningRecord,
)
from joestar.profile.places import Merged, merged

WIDE = 20
"""Largest size over the smallest, from which an axis is logarithmic."""


@dataclass
class ProgramRows:
    """A program with what the page shows of it."""

    record: ProgramRecord
    sizes: dict | None
    active: list[PassSummary]
    idle: list[PassSummary]
    places: list[Merged]


def program(record: ProgramRecord) -> ProgramRows:
    """Its sizes, passes (idle ones apart) and places (equal ones merged)."""
    active = [row for row in record.passes if row.rewrites or row.nodes_before != row.nodes_after or row.skipped]
    idle = [row for row in record.passes if row not in active]
    return ProgramRows(record, sizes(record.sets), active, idle, merged(record.places))


def candidates(tuning: TuningRecord) -> list[tuple]:
    """(candidate, bar)."""

    def time(candidate: CandidateRecord) -> float:
        return candidate.compiled_ms or candidate.eager_ms or 0.0

    longest = max((time(candidate) for candidate in tuning.candidates), default=0.0) or 1.0
    rows = []
    for candidate in tuning.candidates:
        kind = "main" if candidate.taken else "rest"
        text = f"{numbers.milliseconds(time(candidate))} per step" if time(candidate) else "not timed"
        rows.append((candidate, chart(text, [Box(0, time(candidate) / longest, kind)], height=12)))
    return rows


def sizes(sets: list[SetRecord]) -> dict | None:
    """Charts of the sets on a common axis, from zero or logarithmic; ``None`` without sets."""
    if not sets:
        return None
    smallest, largest = min(row.minimum for row in sets), max(max(row.maximum, row.bound or 0) for row in sets)
    wide = largest > WIDE * max(1, smallest)
    axis = LogAxis(smallest, largest) if wide else LinearAxis(largest)
    grid = [Mark(at, "tick") for at, _ in axis.ticks()]
    rows = [(row, _size(row, axis, grid), _padding(row)) for row in sets]
    return {"rows": rows, "ticks": axis.labels(), "logarithmic": wide, "unstored": any(not row.stored for row in sets)}


def _size(row: SetRecord, axis: LinearAxis | LogAxis, grid: list[Mark]) -> Markup:
    text = f"{row.name}: {row.minimum:,} to {row.maximum:,}, mean {row.mean:,.0f}"
    boxes = [Box(axis.at(row.minimum), axis.at(row.maximum), "range", text)]
    marks = [*grid, Mark(axis.at(row.mean), "mean", text, dot=True)]
    if row.bound is not None:
        text += f", bound {row.bound:,}"
        boxes.insert(0, Box(axis.at(row.maximum), axis.at(row.bound), "hatch", "room above the largest"))
        marks.append(Mark(axis.at(row.bound), "bound", f"bound {row.bound:,}"))
    return chart(text, boxes, marks, 22, inset=5)


def _padding(row: SetRecord) -> Markup | None:
    if row.waste is None:
        return None
    told = f"{numbers.percent(row.waste)} of the bound is padding"
    return chart(told, [Box(0, 1 - row.waste, "main"), Box(1 - row.waste, 1, "hatch")], height=12)
