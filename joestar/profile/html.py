"""The ledger as one HTML page: styles and charts inside, nothing loaded, no scripts.

This module hands the records to ``report.html.jinja`` as rows and charts, which ``html_time`` and ``html_tables`` make;
``report.css`` lays them out. The template escapes everything that it is handed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from joestar.profile import clocks, html_tables, html_time, numbers
from joestar.profile.findings import caveat, findings
from joestar.profile.ledger import ProfileRecord, Report
from joestar.profile.phases import MEANING
from joestar.profile.places import place

FOLDER = Path(__file__).parent


def render_html(report: Report) -> str:
    """The page, complete in itself."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters.update(
        bytes=_whole(numbers.human_bytes), rate=_whole(numbers.human_rate), ms=_whole(numbers.milliseconds),
        percent=_whole(numbers.percent), seconds=_whole(numbers.seconds), count=numbers.count, digits=numbers.digits,
        place=place, breaks=breaks, units=units,
    )  # fmt: skip
    profile, tuning = report.profile, report.tuning
    return environment.get_template("report.html.jinja").render(
        report=report,
        style=Markup((FOLDER / "report.css").read_text()),
        findings=findings(report),
        caveat=caveat(report),
        tiles=tiles(report),
        meaning=MEANING,
        phases=html_time.phases(profile) if profile else None,
        layers=html_time.layers(profile) if profile else [],
        kernels=html_time.kernels(profile) if profile else ([], []),
        floor=html_time.floor(profile) if profile else None,
        stages=html_time.stages(profile) if profile else None,
        candidates=html_tables.candidates(tuning) if tuning else [],
        programs=[html_tables.program(program) for program in report.programs],
        sites=[(program, site) for program in report.programs for site in program.sites],
        clocks=clocks.clocks(report),
        once=clocks.once(report),
        events=clocks.events(report),
    )


def _whole(text):
    """A filter that keeps a number and its unit on one line."""
    return lambda value: text(value).replace(" ", "\N{NO-BREAK SPACE}")


def units(text: str) -> str:
    """A sentence whose numbers stay on one line with their units."""
    return re.sub(r"(?<=\d) (?=(%|ms|s|h|B|[KMGT]iB|µs|steps?|epochs?)\b|%)", "\N{NO-BREAK SPACE}", text)


def breaks(text: str) -> Markup:
    """A long name that may break behind its separators, not within words."""
    parts = re.split(r"(?<=[_:.,/<>(=])(?=[^_:.,/<>(=\s])", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


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
            "Compiling", *numbers.seconds(report.compile_seconds).split(),
            f"once, no part of the steps; {numbers.plural(counters.recompiles, 'recompilation')}",
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
        note = f"the step would take {numbers.milliseconds(profile.floor_milliseconds)} if memory were the only limit"
        found.append(Tile("Share of the floor", f"{share * 100:.3g}", "%", note))
    return found


def _clock_tiles(report: Report) -> list[Tile]:
    spent = sum(report.counters.seconds.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
    if not report.counters.steps or not spent:
        return []
    mean = spent / report.counters.steps * 1e3
    return [Tile("Step, host clock", numbers.digits(mean), "ms", f"mean of {report.counters.steps:,} steps")]
