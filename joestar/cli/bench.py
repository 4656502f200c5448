"""``joestar bench``: tables of measured steps."""

import torch
from rich.console import Console
from rich.table import Table

from joestar.bench import user_models
from joestar.bench.step import Setting, check_device, machine, run
from joestar.cli.console import human_bytes
from joestar.cli.files import check_writable, write_json
from joestar.errors import ConfigError


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
    check_writable(report, "--json")
    result = run(setting, lambda text: console.print(text, highlight=False, soft_wrap=True))
    console.print(_table(result), width=max(console.width, 132), crop=False, soft_wrap=True)
    console.print(result["machine"], highlight=False, soft_wrap=True)
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
    console.print(_user_table(result), width=max(console.width, 120), crop=False, soft_wrap=True)
    console.print(result["machine"], highlight=False, soft_wrap=True)
    _kernels(result, console)
    if report is not None:
        write_json(report, result)


def bench_kernels(device: str, shape: str, only: str, report: str | None, console: Console) -> None:
    """Prints every row as soon as it is measured, and writes the JSON if a file is given."""
    check_writable(report, "--json")
    check_device(device)

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


def _table(result: dict) -> Table:
    setting = result["setting"]
    title = (
        f"{setting['shape']} on {setting['device']}, {setting['precision']}, batch {setting['batch_size']}, fanouts "
        f"{','.join(map(str, setting['fanouts']))}, hidden {setting['hidden']}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model")
    for name in ("how", "ms/step", "p20", "p80", "x", "sampling", "s/epoch", "first s", "memory", "launch", "kernels"):
        table.add_column(name, justify="right", no_wrap=True)
    base = {row["model"]: row["step"]["median"] for row in result["rows"] if row["how"] == "eager"}
    for row in result["rows"]:
        step, launched = row["step"], row["launches"]
        ratio = f"{base[row['model']] / step['median']:.1f}" if row["model"] in base else "-"
        sampling = f"{row['sampling']['median']:.2f}" if row["sampling"] else "-"
        table.add_row(
            row["model"], row["how"], f"{step['median']:.3f}", f"{step['p20']:.3f}", f"{step['p80']:.3f}", ratio,
            sampling, f"{row['epoch_seconds']:.3f}", f"{row['first_step_seconds']:.1f}", human_bytes(row["memory"]),
            f"{launched['launches']:.0f}" if launched else "-", f"{launched['kernels']:.0f}" if launched else "-",
        )  # fmt: skip
    return table


def _user_table(result: dict) -> Table:
    setting = result["setting"]
    title = (
        f"user models, {setting['shape']} on {setting['device']}, {setting['precision']}, batch "
        f"{setting['batch_size']}, fanouts {','.join(map(str, setting['fanouts']))}, hidden {setting['hidden']}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("model")
    for name in ("how", "ms/step", "p20", "p80", "x", "first s", "memory", "launch"):
        table.add_column(name, justify="right", no_wrap=True)
    ours = {row["model"]: row["step"]["median"] for row in result["rows"] if row["how"].startswith("joestar")}
    for row in result["rows"]:
        step, launched = row["step"], row["launches"]
        ratio = "-" if row["how"].startswith("joestar") else f"{step['median'] / ours[row['model']]:.2f}"
        table.add_row(
            row["model"], row["how"], f"{step['median']:.2f}", f"{step['p20']:.2f}", f"{step['p80']:.2f}", ratio,
            f"{row['first_step_seconds']:.1f}", human_bytes(row["memory"]),
            f"{launched['launches']:.0f}" if launched else "-",
        )  # fmt: skip
    return table
