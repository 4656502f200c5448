"""``joestar partition``: divide a graph into parts, keep them, and say what they cost."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from joestar.cli.config import MOST_SEED
from joestar.cli.console import columns, err, out, plain_errors, say_path
from joestar.cli.help import Command, option
from joestar.errors import ConfigError

if TYPE_CHECKING:
    from joestar.graph_api import Graph
    from joestar.partitioning import Partitioning

METHODS = "gap|random|metis"
METIS_EDGES = 50_000_000
"""Edges up to which METIS is shown unasked: it needs many times the memory of the graph."""
HEADERS = ("method", "edges cut", "largest", "label skew", "excess", "surplus", "halo", "largest", "seconds")


def add_to(app: typer.Typer) -> None:
    """Makes it a command of ``app``."""
    app.command("partition", cls=Command)(plain_errors(partition))


def partition(
    dataset: Annotated[str, typer.Argument(help="Name, file or folder of a graph.", metavar="DATASET")] = "cora",
    parts: Annotated[int, option("How many parts, at most one per node.", min=1, metavar="N")] = 64,
    output: Annotated[str | None, option("Write the parts, for training by parts.", "--out", metavar="FILE")] = None,
    method: Annotated[str, option("How to divide.", metavar=METHODS)] = "gap",
    passes: Annotated[int, option("Passes of GAP over the nodes.", min=1, metavar="N")] = 10,
    cap: Annotated[float, option("Most nodes of a part, as a multiple of the mean.", min=1.0, metavar="X")] = 1.5,
    balance: Annotated[float, option("Price of uneven labels, 1: as Fennel's.", min=0.0, metavar="X")] = 1.0,
    seed: Annotated[int, option("Of where the nodes' stream begins.", min=0, max=MOST_SEED, metavar="N")] = 0,
    compare: Annotated[
        str | None,
        option("Show these beside it, by commas; or none.", metavar="NAMES", show_default="random, METIS if there"),
    ] = None,
    root: Annotated[
        Path | None,
        option("Where names are looked up.", metavar="FOLDER", show_default="$JOESTAR_DATA, ~/.cache/joestar, dataset"),
    ] = None,
    as_json: Annotated[bool, option("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Divide a graph into parts with few edges between them and alike training labels.

    The report shows the share of edges between parts; the largest part, in means; how far the training labels of a part
    are from those of all (0: alike, 1: disjoint), the excess of pairs of one label in a part (0: as by chance, even in
    small parts), and the share of training nodes above even shares of their label; and the halo, nodes of other parts
    with an edge into a part: the mean and the largest. METIS is shown if pymetis is installed and the graph has at most
    50 million edges, or if asked for.

    Examples:
        joestar partition cora --parts 16
        joestar partition my-graph --parts 1024 --passes 3 --out my-parts.npz
        joestar partition my-graph.npz --compare none --json
    """
    from joestar.cli.files import check_outputs, place_of
    from joestar.data import load

    check_outputs({"--out": output}, {"the dataset": place_of(dataset, root)})
    _check_names(compare)
    graph = load(dataset, root=root, verbose=not as_json)
    others = _others(compare, method, graph.num_edges)
    settings = {"passes": passes, "cap": cap, "balance": balance, "seed": seed}
    made, row = _measured(graph, parts, method, settings)
    written = str(made.save(output)) if output else None  # in front of comparisons, which take long and may fail
    rows = [row, *(_measured(graph, parts, other, settings)[1] for other in others)]
    if as_json:
        typer.echo(json.dumps({"graph": graph.name, "parts": parts, "file": written, "methods": rows}, indent=2))
    else:
        print_report(graph, parts, rows, written, out())


def print_report(graph: Graph, parts: int, rows: list[dict[str, Any]], written: str | None, console: Console) -> None:
    """The facts of every method as one table."""
    name = f"{graph.name}: " if graph.name else ""
    say_path(console, f"{name}{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {parts:,} parts")
    for line in columns(HEADERS, [_cells(row) for row in rows]):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if written:
        say_path(console, f"Written: {written}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    labels = ("-" if row[key] is None else f"{row[key]:.3f}" for key in ("skew", "excess", "surplus"))
    halo = f"{row['halo_mean']:,.0f}", f"{row['halo_max']:,}"
    return row["method"], f"{row['cut_share']:.1%}", f"{row['balance']:.2f}x", *labels, *halo, f"{row['seconds']:.1f}"


def _check_names(compare: str | None) -> None:
    for name in [] if compare in (None, "none") else compare.split(","):
        if name not in METHODS.split("|"):
            raise ConfigError(f"--compare: expected some of {', '.join(METHODS.split('|'))}, or none; got {name!r}.")


def _others(compare: str | None, method: str, edges: int) -> list[str]:
    """Methods to show beside ``method``."""
    if compare is None:
        with_metis = edges <= METIS_EDGES and importlib.util.find_spec("pymetis") is not None
        wanted = ["gap", "random", *(["metis"] if with_metis else [])]
    else:
        wanted = [] if compare == "none" else compare.split(",")
    return [name for name in wanted if name != method]


def _measured(graph: Graph, parts: int, method: str, settings: dict[str, Any]) -> tuple[Partitioning, dict[str, Any]]:
    from joestar.partitioning import facts_of
    from joestar.partitioning import partition as divide

    with _progress(method, settings["passes"]) as progress:
        start = time.perf_counter()
        made = divide(graph, parts, method=method, progress=progress, **settings)
        seconds = time.perf_counter() - start
    return made, {"method": method, **facts_of(graph, made.assignment, parts).as_dict(), "seconds": seconds}


@contextmanager
def _progress(method: str, passes: int) -> Iterator[Any]:
    """A line on the terminal that says how far it is; nothing elsewhere."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    with console.status(f"{method} ...") as status:
        yield lambda index, share: status.update(f"{method}: pass {min(index + 1, passes)} of {passes}, {share:.0%}")
