"""Charts of the report's page: inline SVG without coordinates of pixels.

Everything is placed in percent of the width, so a chart takes whatever room the page gives it while its heights, lines
and letters stay as they are. Colours are classes of the page's style sheet. Each has a text for screen readers.
"""

import math
from dataclasses import dataclass

from markupsafe import Markup

from joestar.profile.numbers import short

HEIGHT = 18


@dataclass(frozen=True)
class Box:
    """A bar from ``start`` to ``end`` (shares of the width, 0 to 1); ``kind``: its class; title: shown on hover."""

    start: float
    end: float
    kind: str
    title: str = ""


@dataclass(frozen=True)
class Mark:
    """A vertical line (``dot``: a circle) at a share of the width."""

    at: float
    kind: str
    title: str = ""
    dot: bool = False


def chart(text: str, boxes: list[Box], marks: list[Mark] = (), height: int = HEIGHT, inset: int = 0) -> Markup:
    """One row of bars and marks.

    Args:
        text: what it shows, in words; inset: pixels that are left free above and below the bars.
    """
    parts = [_box(box, height, inset) for box in boxes] + [_mark(mark, height) for mark in marks]
    return Markup('<svg role="img" width="100%" height="{}"><title>{}</title>{}</svg>').format(
        height, text, Markup("").join(parts)
    )


def _box(box: Box, height: int, inset: int) -> Markup:
    start, end = _within(box.start), _within(box.end)
    rect = Markup('<rect class="{}" x="{}%" y="{}" width="{}%" height="{}">{}</rect>')
    size = height - 2 * inset
    return rect.format(box.kind, _percent(start), inset, _percent(max(0.0, end - start)), size, _title(box.title))


def _mark(mark: Mark, height: int) -> Markup:
    at, title = _percent(_within(mark.at)), _title(mark.title)
    if mark.dot:
        return Markup('<circle class="{}" cx="{}%" cy="{}" r="4">{}</circle>').format(mark.kind, at, height / 2, title)
    line = Markup('<line class="{}" x1="{}%" x2="{}%" y1="0" y2="{}">{}</line>')
    return line.format(mark.kind, at, at, height, title)


def _title(text: str) -> Markup:
    return Markup("<title>{}</title>").format(text) if text else Markup("")


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))


def _percent(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".")


class Axis:
    """Places values on a chart. ``at``: where a value stands, as a share of the width; ``ticks``: (place, value)."""

    def at(self, value: float) -> float:
        """Where a value stands, as a share of the width."""
        raise NotImplementedError

    def ticks(self) -> list[tuple[float, float]]:
        """(place, value) of round values."""
        raise NotImplementedError

    def labels(self) -> list[tuple[str, str]]:
        """(place in percent, text) of the ticks, which do not run into each other on a phone."""
        return [(_percent(at), short(value)) for at, value in self.ticks()]


class LinearAxis(Axis):
    """An axis from zero, with a little room at its end."""

    ROOM = 0.04
    MOST = 6

    def __init__(self, largest: float):
        self.end = (largest or 1.0) * (1 + self.ROOM)

    def at(self, value: float) -> float:
        """Where a value stands, as a share of the width."""
        return value / self.end

    def ticks(self) -> list[tuple[float, float]]:
        """(place, value) of multiples of 1, 2 or 5 times a power of ten, zero among them."""
        power = 10.0 ** math.floor(math.log10(self.end))
        steps = (power * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5))
        step = next(step for step in steps if self.end / step < self.MOST)
        return [(self.at(k * step), k * step) for k in range(int(self.end / step) + 1)]


class LogAxis(Axis):
    """A logarithmic axis with a little room at both ends.

    Args:
        smallest, largest: values that it holds; what is smaller than 1 stands where 1 does.
    """

    ROOM = 0.05
    STEPS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), *(tuple(k / n for k in range(n, 10 * n)) for n in (4, 10)))
    TICKS = 3

    def __init__(self, smallest: float, largest: float):
        self.low = math.log10(max(1.0, smallest)) - self.ROOM
        self.high = math.log10(max(1.0, largest)) + self.ROOM

    def at(self, value: float) -> float:
        """Where a value stands, as a share of the width."""
        return (math.log10(max(1.0, value)) - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, float]]:
        """(place, value) of round values: powers of ten if there are enough of them, else finer steps."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        for steps in self.STEPS:
            values = [step * 10**power for power in powers for step in steps]
            values = [value for value in values if 0 <= self.at(value) <= 1 and value >= 1]
            if len(values) >= self.TICKS:
                break
        return [(self.at(value), value) for value in values]
