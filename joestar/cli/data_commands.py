"""``joestar generate`` and ``joestar convert``: their flags, and the bar that they show."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from joestar.cli.console import err, out, plain_errors, say_path
from joestar.cli.help import option

Target = Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUT")]
Memory = Annotated[str, option("To work in, beside Python and PyTorch themselves (0.4 GiB).", metavar="SIZE")]
Overwrite = Annotated[bool, option("Replace OUT, if it is a converted graph alone.", "--overwrite")]
TYPES = "fp32|fp16|bf16"


@plain_errors
def generate(
    shape: Annotated[
        str,
        typer.Argument(help="One of tiny, mini, small, products, papers100M, mag240m-c.", metavar="SHAPE"),
    ],
    target: Target,
    scale: Annotated[float, option("Times as many nodes, and nodes of the splits.")] = 1.0,
    dtype: Annotated[str, option("Of the features.", metavar=TYPES)] = "fp32",
    seed: Annotated[int, option("Another number, another graph.")] = 0,
    ids: Annotated[str, option("Shuffled, or communities in a row.", metavar="shuffled|planted")] = "shuffled",
    memory: Memory = "4GiB",
    device: Annotated[str, option("Where to compute; the graph is the same.", metavar="cpu|cuda")] = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Write a planted graph at the shape of a public dataset, in bounded memory.

    Features alone tell the labels of at most 45 % of the nodes; a GNN reaches 75 to 90 %. The same seed gives the same
    files, whatever the memory, the device or the number of threads.

    Examples:
        joestar generate tiny graphs/tiny
        joestar generate papers100M graphs/papers --memory 16GiB --device cuda
        joestar generate mag240m-c graphs/mag --scale 0.25 --dtype fp16
    """
    from joestar.data.generate import generate
    from joestar.errors import ConfigError

    if ids not in ("shuffled", "planted"):
        raise ConfigError(f"--ids must be shuffled or planted; got {ids!r}.")
    with _bar() as progress:
        made = generate(
            shape, target, scale=scale, dtype=dtype, seed=seed, shuffled=ids == "shuffled", memory=memory,
            device=device, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    say_path(out(), f"written: {made}")


@plain_errors
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of OGB or MAG240M, or with edges.npy, .csv or .parquet; file of edges; ogb:ogbn-products.",
            metavar="SOURCE",
        ),
    ],
    target: Target,
    features: Annotated[Path | None, option("Features [N, F], an .npy file.", metavar="FILE")] = None,
    labels: Annotated[Path | None, option("Labels [N] or [N, T], an .npy file.", metavar="FILE")] = None,
    nodes: Annotated[
        int | None, option("Number of nodes.", min=1, metavar="N", show_default="that of the features, or by the ids")
    ] = None,
    undirected: Annotated[
        bool | None,
        option("Whether to add the reverses of edges.", "--undirected/--directed", show_default="as the format has it"),
    ] = None,
    duplicates: Annotated[
        bool | None,
        option(
            "Whether to keep equal edges.", "--keep-duplicates/--drop-duplicates",
            show_default="as the format has it; dropped with --undirected",
        ),
    ] = None,
    self_loops: Annotated[
        bool | None,
        option(
            "Whether to keep edges from a node to itself.", "--keep-self-loops/--drop-self-loops",
            show_default="as the format has it",
        ),
    ] = None,
    dtype: Annotated[
        str | None, option("Of the features.", metavar=TYPES, show_default="fp16 stays, others become fp32")
    ] = None,
    task: Annotated[
        str | None, option("What labels [N] are.", metavar="classes|regression", show_default="classes")
    ] = None,
    check: Annotated[bool, option("Look for NaN and infinite features.", "--check")] = False,
    memory: Memory = "4GiB",
    header: Annotated[
        bool | None,
        option("Whether a text file names its columns.", "--header/--no-header", show_default="looked at"),
    ] = None,
    columns: Annotated[
        str | None,
        option("Names of a table's source and target.", metavar="NAMES", show_default="source,target or the first two"),
    ] = None,
    root: Annotated[Path, option("Where the package ogb downloads to.", metavar="FOLDER")] = Path("dataset"),
    overwrite: Overwrite = False,
) -> None:  # fmt: skip
    """Convert a dataset to a folder that is mapped into memory, in bounded memory itself.

    Stopped by whatever cause, the same command goes on where it was. OUT appears when it is complete.

    Examples:
        joestar convert dataset/ogbn_papers100M graphs/papers --dtype bf16
        joestar convert ogb:ogbn-products graphs/products    # by the package ogb
        joestar convert edges.csv graphs/mine --features x.npy --undirected
    """
    from joestar.data.convert import convert
    from joestar.errors import ConfigError

    ends = None if columns is None else tuple(name.strip() for name in columns.split(","))
    if ends is not None and len(ends) != 2:
        raise ConfigError(f"--columns takes two names, source and target, by a comma; got {columns!r}.")
    with _bar() as progress:
        made = convert(
            source, target, features=features, labels=labels, num_nodes=nodes, undirected=undirected,
            drop_duplicates=None if duplicates is None else not duplicates,
            drop_self_loops=None if self_loops is None else not self_loops, dtype=dtype, task=task, check=check,
            memory=memory, header=header, columns=ends, root=root, overwrite=overwrite, progress=progress,
        )  # fmt: skip
    say_path(out(), f"written: {made}")


@contextlib.contextmanager
def _bar() -> Iterator:
    """Shows progress on a terminal: a bar per phase."""
    console = err()
    shown = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(show_speed=True),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*shown, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield progress
