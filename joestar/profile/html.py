"""The ledger as one HTML page: styles and charts inside, nothing loaded, no scripts.

This module turns records into rows and charts; ``report.html.jinja`` and ``report.css`` lay them out. The template
escapes everything that it is handed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from joestar.profile import numbers
from joestar.profile.charts import Box, LogAxis, Mark, chart
from joestar.profile.ledger import (
    CandidateRecord,
    ProfileRecord,
    Report,
    SetRecord,
    StageRecord,
    TuningRecord,
)

FOLDER = Path(__file__).parent
SHOWN = 20
"""Kernels that are shown at once; the others unfold."""
COLOURS = {**{name: name for name in ("sampling", "forward", "backward", "optimizer")}, "set-up of the epoch": "setup"}
"""Class of a phase in the style sheet; other phases are grey."""
SOURCE = re.compile(r"^(?P<file>.*?):(?P<line>\d+) in (?P<function>.*?): (?P<code>.*)$", re.DOTALL)


def render_html(report: Report) -> str:
    """The page, complete in itself."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(
        bytes=numbers.human_bytes, rate=numbers.human_rate, ms=numbers.milliseconds, percent=numbers.percent,
        count=numbers.count, digits=numbers.digits, place=place,
    )  # fmt: skip
    profile, tuning = report.profile, report.tuning
    return environment.get_template("report.html.jinja").render(
        report=report,
        style=Markup((FOLDER / "report.css").read_text()),
        tiles=tiles(report),
        phases=_phases(profile) if profile else None,
        kernels=_kernels(profile) if profile else [],
        shown=SHOWN,
        floor=_floor(profile) if profile else None,
        stages=_stages(profile.stages) if profile else [],
        candidates=_candidates(tuning) if tuning else [],
        programs=[(program, _sizes(program.sets)) for program in report.programs],
        sites=[(program, site) for program in report.programs for site in program.sites],
        clocks=_clocks(report),
        events=_events(report),
    )


# --- headline ---


@dataclass
class Tile:
    """A number of the headline; ``warn``: worth a look."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    warn: bool = False


def tiles(report: Report) -> list[Tile]:
    """The headline: what a person wants to know first."""
    counters, found = report.counters, _measured_tiles(report.profile) if report.profile else _clock_tiles(report)
    rate = counters.replay_rate
    found.append(
        Tile(
            "Padded steps", "-" if rate is None else f"{rate * 100:.4g}", "" if rate is None else "%",
            f"{counters.padded_steps:,} of {counters.steps:,} ran as one static program",
            report.execution == "padded" and rate is not None and rate < 0.95,
        )
    )  # fmt: skip
    wastes = [row.waste for program in report.programs[:1] for row in program.sets if row.waste is not None]
    if wastes:
        note = f"of a set on average, at most {numbers.percent(max(wastes))}"
        found.append(Tile("Padding", f"{sum(wastes) / len(wastes) * 100:.1f}", "%", note))
    found += [
        Tile(
            "Fallbacks", f"{counters.fallbacks:,}", "", f"batches redone exactly; {counters.overflows:,} overflows",
            counters.fallbacks > 0,
        ),
        Tile(
            "Recompiles", f"{counters.recompiles:,}", "",
            f"compiling took {sum(sum(program.seconds.values()) for program in report.programs):.1f} s in all",
            counters.recompiles > 0,
        ),
    ]  # fmt: skip
    if report.profile is not None and report.profile.peak_bytes is not None:
        value, unit = numbers.human_bytes(report.profile.peak_bytes).split()
        found.append(Tile("Peak memory", value, unit, "of a step, beyond what was there before"))
    return found


def _measured_tiles(profile: ProfileRecord) -> list[Tile]:
    spread = f"{numbers.digits(profile.p20)} to {numbers.digits(profile.p80)} in the middle of {profile.steps} steps"
    found = [Tile("Step", numbers.digits(profile.milliseconds), "ms", spread)]
    if profile.epoch_seconds is not None:
        value, unit = numbers.seconds(profile.epoch_seconds).split()
        found.append(Tile("Epoch", value, unit, f"{numbers.plural(profile.epoch_steps, 'step')} at the median"))
    if profile.floor_milliseconds is not None:
        share = profile.floor_milliseconds / profile.milliseconds
        note = f"{numbers.milliseconds(profile.floor_milliseconds)} if memory were the only limit"
        found.append(Tile("Share of the floor", f"{share * 100:.3g}", "%", note))
    return found


def _clock_tiles(report: Report) -> list[Tile]:
    spent = sum(report.counters.seconds.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
    if not report.counters.steps or not spent:
        return []
    mean = spent / report.counters.steps * 1e3
    return [Tile("Step, host clock", numbers.digits(mean), "ms", f"mean of {report.counters.steps:,} steps")]


# --- time ---


def _colour(phase: str) -> str:
    return COLOURS.get(phase, "rest")


def _phases(profile: ProfileRecord) -> dict:
    """The stacked bar, the rows of its table, and their sum in milliseconds."""
    total = sum(profile.phases.values())
    rows = [(name, _colour(name), spent, spent / total if total else 0.0) for name, spent in profile.phases.items()]
    floor = profile.floor_milliseconds
    scale = max(total, floor or 0.0) or 1.0
    boxes, start = [], 0.0
    for name, colour, spent, share in rows:
        title = f"{name}: {numbers.milliseconds(spent)}, {numbers.percent(share)}"
        boxes.append(Box(start / scale, (start + spent) / scale, colour, title))
        start += spent
    marks = [Mark(floor / scale, "floor", f"floor: {numbers.milliseconds(floor)}")] if floor else []
    text = "Time per phase: " + ", ".join(f"{name} {numbers.milliseconds(spent)}" for name, _, spent, _ in rows)
    return {"chart": chart(text, boxes, marks, 34), "rows": rows, "total": total, "floor": bool(floor)}


def _kernels(profile: ProfileRecord) -> list[tuple]:
    """(kernel, colour, share of all kernels, bar)."""
    total = sum(kernel.microseconds for kernel in profile.kernels) or 1.0
    longest = max((kernel.microseconds for kernel in profile.kernels), default=0.0) or 1.0
    rows = []
    for kernel in profile.kernels:
        share, colour = kernel.microseconds / total, _colour(kernel.phase)
        text = f"{kernel.name}: {numbers.percent(share)} of the kernels' time"
        rows.append((kernel, colour, share, chart(text, [Box(0, kernel.microseconds / longest, colour)], height=12)))
    return rows


def _floor(profile: ProfileRecord) -> dict | None:
    """The step beside its floor; ``None`` where the bytes are not known."""
    floor = profile.floor_milliseconds
    if floor is None:
        return None
    scale = max(profile.milliseconds, floor)
    rows = [("step", profile.milliseconds, "main"), ("floor", floor, "rest")]
    return {
        "share": floor / profile.milliseconds,
        "rows": [
            (name, value, chart(f"{name}: {numbers.milliseconds(value)}", [Box(0, value / scale, kind)]))
            for name, value, kind in rows
        ],
    }


def _stages(stages: list[StageRecord]) -> list[tuple]:
    """(stage, milliseconds saved since the one before or ``None``, factor over the first, bar)."""
    rows, scale = [], max((stage.milliseconds for stage in stages), default=1.0) or 1.0
    for position, stage in enumerate(stages):
        before = stages[position - 1].milliseconds if position else None
        now = stage.milliseconds
        boxes = [Box(0, min(now, before or now) / scale, "main")]
        if before is not None and before > now:
            boxes.append(Box(now / scale, before / scale, "saved", f"saves {numbers.milliseconds(before - now)}"))
        elif before is not None:
            boxes.append(Box(before / scale, now / scale, "lost", f"costs {numbers.milliseconds(now - before)}"))
        bar = chart(f"{stage.stage}: {numbers.milliseconds(now)}", boxes, height=24)
        factor = stages[0].milliseconds / now if now else None
        rows.append((stage, None if before is None else before - now, factor, bar))
    return rows


# --- choices, sizes, clocks ---


def _candidates(tuning: TuningRecord) -> list[tuple]:
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


def _sizes(sets: list[SetRecord]) -> dict | None:
    """Charts of the sets on a common logarithmic axis; ``None`` without sets."""
    if not sets:
        return None
    axis = LogAxis(min(row.minimum for row in sets), max(max(row.maximum, row.bound or 0) for row in sets))
    grid = [Mark(at, "tick") for at, _ in axis.ticks()]
    rows = []
    for row in sets:
        text = f"{row.name}: {row.minimum:,} to {row.maximum:,}, mean {row.mean:,.0f}"
        boxes = [Box(axis.at(row.minimum), axis.at(row.maximum), "range", text)]
        marks = [*grid, Mark(axis.at(row.mean), "mean", text, dot=True)]
        if row.bound is not None:
            text += f", bound {row.bound:,}"
            boxes.insert(0, Box(axis.at(row.maximum), axis.at(row.bound), "hatch", "room above the largest"))
            marks.append(Mark(axis.at(row.bound), "bound", f"bound {row.bound:,}"))
        padding = None
        if row.waste is not None:
            told = f"{numbers.percent(row.waste)} of the bound is padding"
            padding = chart(told, [Box(0, 1 - row.waste, "main"), Box(1 - row.waste, 1, "hatch")], height=12)
        rows.append((row, chart(text, boxes, marks, 22, inset=5), padding))
    return {"rows": rows, "ticks": [(f"{at * 100:.4g}", numbers.short(value)) for at, value in axis.ticks()]}


def _clocks(report: Report) -> list[tuple[str, float, float]]:
    """(phase, seconds, milliseconds per step) of the whole run."""
    steps = max(report.counters.steps, 1)
    return [(name, seconds, seconds / steps * 1e3) for name, seconds in report.counters.seconds.items()]


def _events(report: Report) -> list[tuple[str, int]]:
    counters = report.counters
    return [
        ("steps", counters.steps), ("padded", counters.padded_steps), ("exact", counters.exact_steps),
        ("overflows", counters.overflows), ("fallbacks", counters.fallbacks), ("recompiles", counters.recompiles),
        ("CUDA graphs captured", counters.captures), ("warm-up batches", counters.warm_up_batches),
    ]  # fmt: skip


def place(source: str) -> dict[str, str]:
    """A source line, taken apart: ``where`` (the file's last parts and the line), ``function``, ``code``, ``full``."""
    match = SOURCE.match(source)
    if match is None:
        return {"where": source, "function": "", "code": "", "full": source}
    where = "/".join(Path(match["file"]).parts[-3:])
    return {
        "where": f"{where}:{match['line']}", "function": match["function"], "code": match["code"],
        "full": f"{match['file']}:{match['line']}",
    }  # fmt: skip
