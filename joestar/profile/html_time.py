"""Rows and charts of the page that show where time goes: phases, layers, kernels, stages."""

from dataclasses import dataclass

from markupsafe import Markup

from joestar.profile import numbers
from joestar.profile.charts import Box, LinearAxis, Mark, chart
from joestar.profile.ledger import BETWEEN, KernelRecord, ProfileRecord, StageRecord
from joestar.profile.phases import SET_UP

COLOURS = {**{name: name for name in ("sampling", "forward", "backward", "optimizer")}, SET_UP: "setup"}
"""Class of a phase in the style sheet; other phases are grey."""
LEAST, SHOWN = 0.005, 20
"""Share and number of kernels that are shown at once; the others unfold."""


def colour(phase: str) -> str:
    """Class of a phase."""
    return COLOURS.get(phase, "rest")


def phases(profile: ProfileRecord) -> dict:
    """The stacked bar with its axis, the rows of its table, and their sum in milliseconds."""
    total = sum(profile.phases.values())
    rows = [(name, colour(name), spent, spent / total if total else 0.0) for name, spent in profile.phases.items()]
    floor = profile.floor_milliseconds
    axis, boxes, start = LinearAxis(max(total, floor or 0.0)), [], 0.0
    for name, kind, spent, share in rows:
        title = f"{name}: {numbers.milliseconds(spent)}, {numbers.percent(share)}"
        boxes.append(Box(axis.at(start), axis.at(start + spent), kind, title))
        start += spent
    marks = [Mark(axis.at(floor), "floor", f"floor: {numbers.milliseconds(floor)}")] if floor else []
    text = "Time per phase: " + ", ".join(f"{name} {numbers.milliseconds(spent)}" for name, _, spent, _ in rows)
    return {"chart": chart(text, boxes, marks, 34), "rows": rows, "total": total, "ticks": axis.labels()}


# --- layers and kernels ---


@dataclass
class Layer:
    """A layer's time per step, microseconds, and the line of its slowest kernel."""

    name: str
    source: str
    forward: float = 0.0
    backward: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Of all phases."""
        return self.forward + self.backward + self.other


def layers(profile: ProfileRecord) -> list[tuple[Layer, float, Markup]]:
    """(layer, share of all kernels' time, bar), the slowest first; what belongs to no layer is named for what it is."""
    names = {kernel.layer for kernel in profile.kernels if kernel.layer}
    found: dict[str, Layer] = {}
    for kernel in profile.kernels:
        row = found.setdefault(_layer(kernel, names), Layer(_layer(kernel, names), ""))
        row.source = row.source or kernel.source
        part = kernel.phase if kernel.phase in ("forward", "backward") else "other"
        setattr(row, part, getattr(row, part) + kernel.microseconds)
    total = sum(row.total for row in found.values()) or 1.0
    longest = max((row.total for row in found.values()), default=0.0) or 1.0
    rows = sorted(found.values(), key=lambda row: -row.total)
    return [(row, row.total / total, _layer_bar(row, longest)) for row in rows]


def _layer(kernel: KernelRecord, names: set[str]) -> str:
    """The outermost layer that has kernels of its own: ``convs.0`` for ``convs.0.lin_l``."""
    if not kernel.layer:
        named = {BETWEEN: BETWEEN, "optimizer": "the optimizer", "sampling": "sampler"}
        return named.get(kernel.name) or named.get(kernel.phase) or "around the model"
    return min((n for n in names if kernel.layer == n or kernel.layer.startswith(n + ".")), key=len)


def _layer_bar(row: Layer, longest: float) -> Markup:
    boxes, start = [], 0.0
    for part, kind in (("forward", "forward"), ("backward", "backward"), ("other", "rest")):
        spent = getattr(row, part) / longest
        if spent:
            boxes.append(Box(start, start + spent, kind, f"{part}: {numbers.digits(getattr(row, part))} µs"))
        start += spent
    return chart(f"{row.name}: {numbers.digits(row.total)} µs", boxes, height=12)


def kernels(profile: ProfileRecord) -> tuple[list[tuple], list[tuple]]:
    """(those to show, those to fold), each (kernel, colour, share of all kernels, bar)."""
    total = sum(kernel.microseconds for kernel in profile.kernels) or 1.0
    longest = max((kernel.microseconds for kernel in profile.kernels), default=0.0) or 1.0
    rows = []
    for kernel in profile.kernels:
        share, kind = kernel.microseconds / total, colour(kernel.phase)
        text = f"{kernel.name}: {numbers.percent(share)} of the kernels' time"
        rows.append((kernel, kind, share, chart(text, [Box(0, kernel.microseconds / longest, kind)], height=12)))
    shown = max(1, min(SHOWN, sum(share >= LEAST for _, _, share, _ in rows)))
    return rows[:shown], rows[shown:]


# --- floor and stages ---


def floor(profile: ProfileRecord) -> dict | None:
    """The step beside its floor; ``None`` where the bytes are not known."""
    least = profile.floor_milliseconds
    if least is None:
        return None
    axis = LinearAxis(max(profile.milliseconds, least))
    rows = [("step", profile.milliseconds, "main"), ("floor", least, "rest")]
    return {
        "share": least / profile.milliseconds,
        "rows": [
            (name, value, chart(f"{name}: {numbers.milliseconds(value)}", [Box(0, axis.at(value), kind)]))
            for name, value, kind in rows
        ],
        "ticks": axis.labels(),
    }


@dataclass
class Bar:
    """A stage or a baseline; ``saved``: milliseconds less than the stage before; ``factor``: over the first stage."""

    stage: StageRecord
    bar: Markup
    saved: float | None = None
    factor: float | None = None


def stages(profile: ProfileRecord) -> dict | None:
    """Bars of the baselines and the stages on one axis; ``None`` without stages."""
    found = profile.stages
    if not found:
        return None
    axis = LinearAxis(max(stage.milliseconds for stage in [*profile.baselines, *found]))
    rows = [_baseline(stage, axis) for stage in profile.baselines]
    for position, stage in enumerate(found):
        rows.append(_stage(stage, found[position - 1].milliseconds if position else None, found[0], axis))
    gain = None
    if profile.baselines and found[-1].milliseconds:
        gain = profile.baselines[0].milliseconds / found[-1].milliseconds
    return {"rows": rows, "ticks": axis.labels(), "over_baseline": gain}


def _baseline(stage: StageRecord, axis: LinearAxis) -> Bar:
    text = f"{stage.stage}: {numbers.milliseconds(stage.milliseconds)}"
    return Bar(stage, chart(text, [Box(0, axis.at(stage.milliseconds), "rest")], height=24))


def _stage(stage: StageRecord, before: float | None, first: StageRecord, axis: LinearAxis) -> Bar:
    now = stage.milliseconds
    boxes = [Box(0, axis.at(min(now, before or now)), "main")]
    if before is not None and before > now:
        boxes.append(Box(axis.at(now), axis.at(before), "saved", f"saves {numbers.milliseconds(before - now)}"))
    elif before is not None:
        boxes.append(Box(axis.at(before), axis.at(now), "lost", f"costs {numbers.milliseconds(now - before)}"))
    bar = chart(f"{stage.stage}: {numbers.milliseconds(now)}", boxes, height=24)
    factor = first.milliseconds / now if now else None
    return Bar(stage, bar, None if before is None else before - now, factor)
