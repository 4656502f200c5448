"""The ledger as text for a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from joestar.profile.ledger import ProgramRecord, Report


def _text(*renderables, width: int = 110) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    return capture.get()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    return table


def render(report: Report) -> str:
    """The report as tables: settings, steps, time per phase, and per program its passes and sizes."""
    env, counters = report.environment, report.counters
    head = (
        f"Joestar {env.joestar} | torch {env.torch} | {env.device} | {env.threads} threads\n"
        f"{report.model} over {report.sampler}; backend {report.backend}, execution {report.execution}\n"
        f"steps {counters.steps}: {counters.padded_steps} padded, {counters.exact_steps} exact; "
        f"overflows {counters.overflows}, fallbacks {counters.fallbacks}, recompiles {counters.recompiles}"
    )
    parts = [head, _phases(report)]
    for program in report.programs:
        parts.extend(_program(program))
    return _text(*parts)


def _phases(report: Report) -> Table:
    table = _table("\nTime per phase", "phase", "seconds", "ms/step")
    steps = max(report.counters.steps, 1)
    for phase, seconds in report.counters.seconds.items():
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / steps * 1e3:.2f}")
    return table


def _program(program: ProgramRecord) -> list:
    compiling = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in program.seconds.items())
    title = f"\nProgram '{program.kind}': batch {program.batch}, compiled {program.compiles} time(s); {compiling}"
    passes = _table(title, "pass", "rewrites", "nodes", "ms")
    for row in program.passes:
        nodes = "off" if row.skipped else f"{row.nodes_before} -> {row.nodes_after}"
        passes.add_row(row.name, str(row.rewrites), nodes, f"{row.milliseconds:.1f}")
    sets = _table("", "set", "min", "mean", "max", "bound", "padding")
    for row in program.sets:
        bound = "-" if row.bound is None else f"{row.bound:,}"
        waste = "-" if row.waste is None else f"{row.waste:.1%}"
        sets.add_row(row.name, f"{row.minimum:,}", f"{row.mean:,.0f}", f"{row.maximum:,}", bound, waste)
    return [passes, sets, escape(explain([program]))] if program.places else [passes, sets]


def explain(programs: list[ProgramRecord]) -> str:
    """The pattern x place table: each fired or refused, with the reason and the source line."""
    lines = []
    for program in programs:
        for place in program.places:
            verdict = "fired  " if place.fired else "refused"
            lines.append(f"[{program.kind}] {verdict} {place.pattern}: {place.detail}\n    at {place.source}")
    return "\n".join(lines) if lines else "No pattern was looked at yet: run a step first."
