"""``joestar bench``: tables of measured steps."""

import re
import statistics
from collections.abc import Callable

import torch
from rich.console import Console

from joestar.bench import epoch, inference, passes, user_models
from joestar.bench.setting import Setting, check_device, machine
from joestar.bench.step import run
from joestar.cli.console import columns, human_bytes
from joestar.cli.files import check_report, check_writable, write_json
from joestar.errors import ConfigError
from joestar.profile.numbers import human_rate

COUNTED = ("launches", "kernels")


def words(text: str) -> tuple[str, ...]:
    """``"sage,gcn"`` as a tuple; ``"none"`` and nothing are empty."""
    return tuple(word for word in text.replace(" ", "").split(",") if word and word != "none")


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """``"15,10,5"`` as a tuple of integers."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise ConfigError(f"{flag} takes integers by commas, e.g. 15,10,5; got {text!r}.") from None


def bench_step(setting: Setting, report: str | None, console: Console) -> None:
    """Measures, prints the table, and writes the JSON if a file is given."""
    check_report(report, setting.dataset)
    result = run(setting, lambda text: console.print(text, highlight=False, soft_wrap=True))
    _step_tables(result, console)
    console.print("\n" + result["machine"], highlight=False, soft_wrap=True)
    _kernels(result, console)
    if report is not None:
        write_json(report, result)


def _kernels(result: dict, console: Console) -> None:
    for row in result["rows"]:
        if row["kernels"]:
            console.print(f"{row['model']} {row['how']}:", highlight=False, soft_wrap=True)
        for name, micros, calls in row["kernels"][:40]:
            console.print(f"{micros:8.1f} us {calls:5.1f}x  {name[:110]}", highlight=False, soft_wrap=True)


def bench_user(setting: user_models.UserSetting, report: str | None, console: Console) -> None:
    """Measures the user models, prints the table, and writes the JSON if a file is given."""
    check_writable(report, "--json")
    result = user_models.run(setting, lambda text: console.print(text, highlight=False, soft_wrap=True))
    _user_tables(result, console)
    console.print("\n" + result["machine"], highlight=False, soft_wrap=True)
    _kernels(result, console)
    if report is not None:
        write_json(report, result)


def bench_passes(
    setting: user_models.UserSetting, only: tuple[str, ...] | None, report: str | None, console: Console
) -> None:
    """Measures every model without each of the passes, prints the table, and writes the JSON if a file is given."""
    check_writable(report, "--json")
    result = passes.run(setting, only, lambda text: console.print(text, highlight=False, soft_wrap=True))
    setting = result["setting"]
    console.print(f"\n{setting['shape']}, on {_about(setting)}", highlight=False)
    _show(console, "Without one pass", passes.lines(result["rows"]))
    console.print("\n" + result["machine"], highlight=False, soft_wrap=True)
    if report is not None:
        write_json(report, result)


def bench_inference(setting: Setting, memory_budget: int | None, report: str | None, console: Console) -> None:
    """Measures, prints the table, and writes the JSON if a file is given."""
    check_report(report, setting.dataset)
    result = inference.run(setting, memory_budget, lambda text: console.print(text, highlight=False, soft_wrap=True))
    _inference_table(result, console)
    console.print("\n" + result["machine"], highlight=False, soft_wrap=True)
    if report is not None:
        write_json(report, result)


def bench_epoch(
    setting: Setting, budget: str, modes: tuple[str, ...], report: str | None, console: Console, busy: bool = True
) -> None:
    """Measures, prints every row as soon as it is there and the table at the end; the JSON grows with the rows."""
    check_report(report, setting.dataset)

    def keep(result: dict) -> None:
        if report is not None:
            write_json(report, result)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    result = epoch.run(setting, budget, modes, say, keep, busy)
    _epoch_tables(result, console)
    console.print("\n" + result["machine"], highlight=False, soft_wrap=True)


def bench_kernels(device: str, shape: str, only: str, report: str | None, console: Console) -> None:
    """Prints every row as soon as it is measured, and writes the JSON if a file is given."""
    check_writable(report, "--json")
    check_device(device)
    try:
        re.compile(only)
    except re.error as error:
        raise ConfigError(f"--only takes a regular expression; got {only!r} ({error}).") from None

    def show(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    if device == "cuda":
        from joestar.bench import kernels_gpu

        rows = kernels_gpu.run(shape, only, report=lambda row: show(kernels_gpu.line(row)))
    else:
        from joestar.bench import kernels_cpu

        show(kernels_cpu.HEADER)
        rows = kernels_cpu.run(report=lambda row: show(kernels_cpu.line(row)))
    show(machine(torch.device(device)))
    if report is not None:
        write_json(report, {"machine": machine(torch.device(device)), "rows": rows})


def _show(console: Console, title: str, lines: list[str]) -> None:
    """A title and a table; lines that are too long for the terminal wrap, nothing is cut."""
    console.print(f"\n[bold]{title}[/]", highlight=False)
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _about(setting: dict) -> str:
    return f"{setting['device']}, {setting['precision']}, batch {setting['batch_size']}, {widths(setting)}"


def widths(setting: dict) -> str:
    """Fanouts and widths: heads where a model has attention, features where they are not the shape's."""
    heads = f", {setting['heads']} heads" if "gat" in setting["models"] and "heads" in setting else ""
    features = f", {setting['features']:,} features" if setting.get("features") else ""
    return f"fanouts {','.join(map(str, setting['fanouts']))}, hidden {setting['hidden']}{heads}{features}"


def _step_tables(result: dict, console: Console) -> None:
    """Three tables, each within 80 columns: steps, whole epochs, and what else was measured."""
    setting, rows = result["setting"], result["rows"]
    orders = {row["ids"] for row in rows}
    what = setting["dataset"] or f"{setting['shape']}, ids {' and '.join(sorted(orders))}"
    ahead = ", prefetch" if setting["prefetch"] else ""
    console.print(f"\n{what}, on {_about(setting)}{ahead}", highlight=False)
    rows = rows if len(orders) > 1 else [row | {"ids": ""} for row in rows]
    base = {(row["model"], row["ids"]): row for row in rows if row["how"] == "eager"}
    _show(console, "Steps", _steps(rows, base))
    whole = [row for row in rows if row["epochs"]]
    if whole:
        _show(console, "Whole epochs by the wall clock, set-up and end included", _whole(whole, base))
    _show(console, "Also", _also(rows))


def _first(row: dict) -> tuple[str, str, str]:
    return row["model"], row["how"], row["ids"]


def _factor(row: dict, base: dict, value) -> str:
    """How many times as long the baseline takes."""
    found = base.get((row["model"], row["ids"]))
    return "-" if found is None else f"{value(found) / value(row):.1f}"


def _steps(rows: list[dict], base: dict) -> list[str]:
    lines = []
    for row in rows:
        step, factor = row["step"], _factor(row, base, lambda of: of["step"]["median"])
        lines.append((*_first(row), *(f"{step[name]:.3f}" for name in ("median", "p20", "p80")), factor))
    return columns(("model", "how", "ids", "ms/step", "p20", "p80", "factor"), lines, 3)


def _whole(rows: list[dict], base: dict) -> list[str]:
    lines = []
    for row in rows:
        epochs, factor = row["epochs"], _factor(row, base, lambda of: of["epochs"]["seconds"])
        times = (f"{epochs[name]:.3f}" for name in ("ms_per_step", "set_up_ms", "one_step_ms"))
        lines.append((*_first(row), _seconds(epochs["seconds"]), *times, factor))
    headers = ("model", "how", "ids", "s/epoch", "ms/step", "set-up ms", "1 step ms", "factor")
    return columns(headers, lines, 3)


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.5f}"


def _also(rows: list[dict]) -> list[str]:
    lines = []
    for row in rows:
        launched, sampling = row["launches"], row["sampling"]
        lines.append((
            *_first(row), f"{row['first_step_seconds']:.1f}", f"{sampling['median']:.2f}" if sampling else "-",
            human_bytes(row["memory"]), *(f"{launched[name]:.0f}" if launched else "-" for name in COUNTED),
        ))  # fmt: skip
    return columns(("model", "how", "ids", "first s", "sampling ms", "memory", *COUNTED), lines, 3)


def _inference_table(result: dict, console: Console) -> None:
    """Times, and how they stand to the bytes that must move at the speed of a copy."""
    setting, speed, lines = result["setting"], result["copy_bytes_per_second"], []
    console.print(
        f"\n{setting['dataset'] or setting['shape']}, all nodes, all neighbours, on {setting['device']}, "
        f"{setting['precision']}, {len(setting['fanouts'])} layers, hidden {setting['hidden']}", highlight=False
    )  # fmt: skip
    for row in result["rows"]:
        took, floors = row["run"]["median"], (row["gathered_bytes"] / speed * 1e3, row["unique_bytes"] / speed * 1e3)
        lines.append((
            row["model"], row["ids"], f"{took:.1f}", f"{floors[0]:.1f}", f"{took / floors[0]:.2f}", f"{floors[1]:.1f}",
            f"{took / floors[1]:.1f}", human_bytes(row["memory"]), f"{row['capture_seconds']:.1f}",
        ))  # fmt: skip
    headers = ("model", "ids", "ms", "per edge", "factor", "per node", "factor", "memory", "capture s")
    _show(console, "Exact inference", columns(headers, lines, 2))
    console.print(
        f"per edge, per node: ms for the bytes that move at {human_rate(speed)} (a copy) if an aggregation reads a row "
        "for every edge, or every row once", highlight=False
    )  # fmt: skip


def _epoch_tables(result: dict, console: Console) -> None:
    """Two tables, each within 80 columns: time, and memory with what came before; rows without figures below."""
    setting, rows = result["setting"], result["rows"]
    several = [name for name in ("model", "ids") if len({row[name] for row in rows}) > 1]
    missing = [f"{row['model']} {row['mode']}: {row['note']}" for row in rows if row["note"]]
    times, memory = [], []
    for row in (row for row in rows if not row["note"]):
        names = (*(row[name] if name in several else "" for name in ("model", "ids")), row["mode"])
        took = statistics.median(row["seconds"][1:] or row["seconds"])
        times.append((
            *names, f"{took:.3f}", *_planned(took, row["predicted_seconds"], "{:.3f}".format),
            "-" if row["bus"] is None else f"{row['bus'] / 1e9:.1f}", _percent(row["match"]), _percent(row["busy"]),
            f"{row['cpu']:.1f}",
        ))  # fmt: skip
        memory.append((
            *names, human_bytes(row["memory"]), *_planned(row["memory"], row["predicted_memory"], human_bytes),
            f"{row['setup']:.1f}", f"{row['seconds'][0]:.1f}",
        ))  # fmt: skip
    console.print(f"\n{_what(setting)}, on {_about(setting)}", highlight=False)
    first = ("model", "ids", "mode")
    headers = (*first, "s/epoch", "plan", "x plan", "bus GB", "match", "busy", "CPU s")
    title = f"Epochs under {human_bytes(setting['budget'])} (resident and cpu do not keep to it)"
    _show(console, title, columns(headers, times, 3))
    headers = (*first, "peak", "plan", "x plan", "set-up s", "first s")
    _show(console, "Memory of the device, and time before", [*columns(headers, memory, 3), *missing])


def _what(setting: dict) -> str:
    scale = "" if setting["scale"] == 1 else f" x {setting['scale']:g}"
    return setting["dataset"] or f"{setting['shape']}{scale}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _planned(found: float, expected: float | None, form: Callable[[float], str]) -> tuple[str, str]:
    """(what was expected, how many times that was found)."""
    return (form(expected), f"{found / expected:.2f}") if expected else ("-", "-")


def _user_tables(result: dict, console: Console) -> None:
    setting, rows = result["setting"], result["rows"]
    console.print(f"\nuser models, {setting['shape']} on {_about(setting)}", highlight=False)
    ours = {row["model"]: row["step"]["median"] for row in rows if row["how"] == "joestar"}
    times, also = [], []
    for row in rows:
        step, launched = row["step"], row["launches"]
        factor = "-" if row["how"] == "joestar" else f"{step['median'] / ours[row['model']]:.2f}"
        measured = (f"{step[name]:.2f}" for name in ("median", "p20", "p80"))
        times.append((row["model"], row["how"], *measured, factor))
        also.append((
            row["model"], row["how"], f"{row['first_step_seconds']:.1f}", human_bytes(row["memory"]),
            f"{launched['launches']:.0f}" if launched else "-",
        ))  # fmt: skip
    _show(console, "Steps", columns(("model", "how", "ms/step", "p20", "p80", "factor"), times, 2))
    notes = [f"{row['model']}, {row['how']}: {row['note']}" for row in rows if row["note"]]
    _show(console, "Also", [*columns(("model", "how", "first s", "memory", "launches"), also, 2), *notes])
