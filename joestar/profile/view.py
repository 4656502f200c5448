"""The ledger as text for a terminal of 80 columns; source lines are never broken."""

import textwrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from joestar.profile import numbers
from joestar.profile.clocks import clocks, once
from joestar.profile.findings import caveat, findings
from joestar.profile.ledger import FeedingRecord, HistoryRecord, ProfileRecord, ProgramRecord, Report, TuningRecord
from joestar.profile.places import merged, place, short_line

SHOWN = 12
"""Kernels that are listed."""
WIDTH = 80
NAME = 25
"""Columns of a kernel's name."""


def _text(*renderables) -> str:
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable, soft_wrap=isinstance(renderable, str))
    return capture.get()


def _table(*columns: str, text: int = 1) -> Table:
    """A table whose first ``text`` columns are words and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(
            column, justify="left" if position < text else "right", overflow="fold", no_wrap=position >= text
        )
    return table


def _wrapped(text: str, indent: str = "") -> str:
    return escape(
        textwrap.fill(
            text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    )  # fmt: skip


def render(report: Report) -> str:
    """The report as tables: what to do next, steps, time, tuning, and per program its passes, choices and sizes."""
    env, counters = report.environment, report.counters
    head = (
        f"Joestar {env.joestar} | torch {env.torch} | {env.device} | {env.threads} threads\n"
        f"{report.model} over {report.sampler}\n"
        f"backend {report.backend}, execution {report.execution}\n"
        f"steps {counters.steps}: {counters.padded_steps} padded, {counters.exact_steps} exact; "
        f"overflows {counters.overflows}, fallbacks {counters.fallbacks}, recompiles {counters.recompiles}"
    )
    if counters.prefetched:
        head += f"\nprefetch: {counters.prefetched} steps found their samples and rows made a step early"
    parts = [escape(head), *_findings(report)]
    if report.profile is not None:
        parts.extend(_profile(report.profile))
    parts.extend(_clocks(report))
    if report.feeding is not None:
        parts.extend(_feeding(report.feeding))
    if report.tuning is not None:
        parts.extend(_tuning(report.tuning))
    for program in report.programs:
        parts.extend(_program(program))
    return _text(*parts)


def _findings(report: Report) -> list:
    found = findings(report)
    lines = [
        _wrapped(f"{number}. {one.number} {one.text} -> {f'{one.setting} {one.advice}'.strip()}", "   ")
        for number, one in enumerate(found, 1)
    ]
    note = caveat(report)
    return [*(["\nWhat to do next"] if found else []), *lines, *([_wrapped(note)] if note else [])]


def _profile(profile: ProfileRecord) -> list:
    step = f"\nA step takes {numbers.milliseconds(profile.milliseconds)} (p20 {numbers.digits(profile.p20)}, p80 "
    step += f"{numbers.digits(profile.p80)}, {profile.steps} steps)"
    if profile.epoch_seconds is not None:
        step += f"; an epoch, {numbers.plural(profile.epoch_steps, 'step')}, {numbers.seconds(profile.epoch_seconds)}"
    lines = [step]
    if profile.floor_milliseconds is not None:
        lines.append(
            f"floor {numbers.milliseconds(profile.floor_milliseconds)}: {numbers.human_bytes(profile.logical_bytes)} "
            f"at {numbers.human_rate(profile.copy_bandwidth)}, "
            f"{numbers.percent(profile.floor_milliseconds / profile.milliseconds)} of the step"
        )
    if profile.peak_bytes is not None:
        moved = ", ".join(f"{bus} {numbers.human_bytes(count)}/step" for bus, count in profile.bus.items())
        lines.append(f"peak memory {numbers.human_bytes(profile.peak_bytes)}; bus: {moved or 'none, all on the host'}")
    return [*lines, *_phases(profile), *_kernels(profile), *_stages(profile)]


def _phases(profile: ProfileRecord) -> list:
    total = sum(profile.phases.values()) or 1.0
    table = _table("phase", "ms/step", "share")
    for phase, spent in profile.phases.items():
        table.add_row(escape(phase), numbers.digits(spent), numbers.percent(spent / total))
    return ["\nTime per phase of a step", table]


def _kernels(profile: ProfileRecord) -> list:
    if not profile.kernels:
        return []
    total = sum(kernel.microseconds for kernel in profile.kernels) or 1.0
    table = _table("kernel", "works for", "phase", "us/step", "share", text=3)
    for kernel in profile.kernels[:SHOWN]:
        name = kernel.name if len(kernel.name) <= NAME else kernel.name[: NAME - 3] + "..."
        share = numbers.percent(kernel.microseconds / total)
        where = " ".join(filter(None, (kernel.layer, short_line(kernel.source))))
        table.add_row(escape(name), escape(where), escape(kernel.phase), numbers.digits(kernel.microseconds), share)
    left = len(profile.kernels) - SHOWN
    return ["\nSlowest kernels", table] + ([f"and {left} more"] if left > 0 else [])


def _stages(profile: ProfileRecord) -> list:
    if not profile.stages:
        return []
    table, first = _table("stage", "ms/step", "speed-up", "kernels", "peak memory"), profile.stages[0].milliseconds
    for stage in [*profile.baselines, *profile.stages]:
        known = stage.milliseconds and stage not in profile.baselines
        table.add_row(
            escape(stage.stage), numbers.digits(stage.milliseconds),
            numbers.digits(first / stage.milliseconds) if known else "-",
            "-" if stage.kernels is None else numbers.count(stage.kernels),
            "-" if stage.bytes is None else numbers.human_bytes(stage.bytes),
        )  # fmt: skip
    note = "\nStages of compiling, each with one thing more (speed-up over Joestar's first)"
    return [note, table, *([_wrapped(profile.no_baseline)] if profile.no_baseline else [])]


def _clocks(report: Report) -> list:
    table = _table("phase of the steps so far, without compiling", "seconds", "ms/step")
    for phase, seconds, mean in clocks(report):
        table.add_row(escape(phase), f"{seconds:.2f}", f"{mean:.2f}")
    for what, seconds in once(report):
        table.add_row(escape(f"once: {what}"), f"{seconds:.2f}", "")
    return ["", table]


def _feeding(feeding: FeedingRecord) -> list:
    counts = ", ".join(f"{name} {count:,}" for name, count in feeding.counts.items())
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in feeding.seconds.items())
    lines = [escape("\nFeeding"), *(_wrapped(line) for line in feeding.plan.splitlines())]
    if not feeding.rows:
        return lines
    table = _table("per macro-batch of the planned size", "planned", "measured")
    for row in feeding.rows:
        table.add_row(row.what, numbers.digits(row.planned), numbers.digits(row.measured))
    for row in feeding.epoch:
        table.add_row(row.what, numbers.digits(row.planned), numbers.digits(row.measured))
    return [*lines, table, _wrapped(f"{counts}; {seconds}"), *_history(feeding.history)]


def _history(layers: list[HistoryRecord]) -> list:
    if not layers:
        return []
    table = _table("hidden layer", "rows", "pushed", "read", "never pushed", "too old", "mean age", "max age", "halo")
    for row in layers:
        shares = (numbers.percent(part / max(1, row.pulled)) for part in (row.missing, row.too_old))
        age = "-" if row.mean_age is None else f"{row.mean_age:.1f}"
        table.add_row(
            f"{row.layer} ({row.width} columns)", f"{row.rows:,}", f"{row.pushed:,}", f"{row.pulled:,}", *shares, age,
            f"{row.max_age}", numbers.percent(row.halo),
        )  # fmt: skip
    return ["", "Historical embeddings: ages in macro-batches; halo: share of macro-batches' nodes", table]


def _tuning(tuning: TuningRecord) -> list:
    origin = "from its cache" if tuning.cached else f"in {tuning.seconds:.1f} s"
    table = _table("differs from the defaults in", "slack", "eager ms", "compiled ms", "")
    for candidate in tuning.candidates:
        choices = ", ".join(f"{key} = {option}" for key, option in candidate.choices.items())
        times = ["-" if time is None else numbers.digits(time) for time in (candidate.eager_ms, candidate.compiled_ms)]
        taken = "taken" if candidate.taken else ""
        table.add_row(escape(choices or "nothing"), numbers.percent(candidate.slack), *times, taken)
    return [f"\nTuner: {len(tuning.candidates)} candidates, {origin}", table]


def _program(program: ProgramRecord) -> list:
    compiling = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in program.seconds.items())
    title = f"Program '{program.kind}': batch {program.batch}, compiled {program.compiles} time(s); {compiling}"
    passes = _table("pass", "rewrites", "nodes", "ms")
    idle = [row for row in program.passes if not (row.rewrites or row.skipped or row.nodes_before != row.nodes_after)]
    for row in program.passes:
        nodes = "off" if row.skipped else f"{row.nodes_before} -> {row.nodes_after}"
        if row not in idle:
            passes.add_row(row.name, str(row.rewrites), nodes, f"{row.milliseconds:.1f}")
    quiet = f"{len(idle)} more passes found nothing to do" if idle else ""
    sets = _table("set", "min", "mean", "max", "bound", "padding")
    for row in program.sets:
        bound = ("-" if row.stored else "not stored") if row.bound is None else f"{row.bound:,}"
        waste = "-" if row.waste is None else f"{row.waste:.1%}"
        sets.add_row(row.name, f"{row.minimum:,}", f"{row.mean:,.0f}", f"{row.maximum:,}", bound, waste)
    parts = ["", _wrapped(title), passes, quiet, "", sets]
    if program.sites:
        sites = _table("choice", "taken", "of", text=3)
        for site in program.sites:
            options = ", ".join(option + " (default)" * (option == site.default) for option in site.options)
            sites.add_row(escape(site.key), escape(site.taken), escape(options))
        parts += ["", sites]
    return [*parts, "", escape(explain([program]))] if program.places else parts


def explain(programs: list[ProgramRecord]) -> str:
    """The pattern x place table: fired, or another form chosen, or refused, with the reason and the source line."""
    lines = []
    for program in programs:
        for row in merged(program.places):
            spot, at = row.place, place(row.place.source)
            times = f" ({row.times} times)" if row.times > 1 else ""
            lines.append(f"[{program.kind}] {spot.verdict:7} {spot.pattern}: {spot.detail}{times}")
            layers = f" ({', '.join(row.layers)})" if row.layers else ""
            function = f" in {at['function']}" if at["function"] else ""
            lines.append(f"    at {at['full']}{function}{layers}")
            lines += [f"        {at['code']}"] if at["code"] else []
    return "\n".join(lines) if lines else "No pattern was looked at yet: run a step first."
