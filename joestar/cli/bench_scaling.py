"""``joestar bench epoch --gpus``, ``--processes``: the table of what more processes bring."""

from dataclasses import replace

from rich.console import Console

from joestar.bench import scaling
from joestar.bench.ranks import Row
from joestar.bench.setting import Setting
from joestar.cli.bench import numbers, widths
from joestar.cli.console import columns, human_bytes
from joestar.cli.files import check_report, write_json
from joestar.errors import ConfigError

TIMES = ("model", "procs", "batch", "s/epoch", "speed-up", "seeds/s", "set-up s", "first s")
SUMS = ("model", "procs", "of a step", "us/sum", "summed", "per link", "memory")


def bench_scaling(
    setting: Setting, gpus: str | None, processes: str | None, report: str | None, console: Console,
    backend: str = "inductor",
) -> None:  # fmt: skip
    """Measures, prints every row as soon as it is there and the table at the end; the JSON grows with the jobs."""
    check_report(report, setting.dataset)
    if gpus is not None and processes is not None:
        raise ConfigError("give --gpus (a process each) or --processes, not both.")
    flag, text = ("--gpus", gpus) if gpus is not None else ("--processes", processes)
    setting = replace(setting, device="cuda") if gpus is not None else setting

    def keep(result: dict) -> None:
        if report is not None:
            write_json(report, result)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    result = scaling.run(setting, numbers(text, flag), backend, say, keep)
    rows = [Row(**row) for row in result["rows"]]
    what = setting.dataset or setting.shape + ("" if setting.scale == 1 else f" x {setting.scale:g}")
    seeds = f"{setting.batch_size} seeds per process and step"
    say(f"\n{what}, {setting.precision}, {seeds}, {widths(result['setting'])}")
    for title, lines in tables(rows):
        console.print(f"\n[bold]{title}[/]\n", highlight=False, end="")
        say("\n".join(lines))
    for machine in dict.fromkeys(row.machine for row in rows if row.machine):
        say(machine)


def tables(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """(title, lines), each within 80 columns; rows without figures behind the last."""
    found, missing = [row for row in rows if not row.note], [row for row in rows if row.note]
    times = [
        (
            row.model, str(row.world), str(row.batch), f"{row.median:.3f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}", f"{row.seeds_per_second:,.0f}", f"{row.setup:.1f}",
            f"{row.seconds[0]:.1f}",
        )
        for row in found
    ]  # fmt: skip
    sums = [
        (
            row.model, str(row.world), f"{row.share:.1%}", f"{row.reduce_us:.1f}", human_bytes(row.reduced_bytes),
            human_bytes(row.link_bytes), human_bytes(row.memory),
        )
        for row in found
    ]  # fmt: skip
    notes = [f"{row.model} on {row.world}: {row.note}" for row in missing]
    return [
        ("Epochs, set-up and the first one (which compiles) not in them", columns(TIMES, times, 1)),
        ("Sums over the ranks, per step; memory of the first device", [*columns(SUMS, sums, 1), *notes]),
    ]
