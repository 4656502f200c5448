"""``joestar doctor``: is everything there that Joestar needs, and does it work?"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from joestar.cli import environment
from joestar.graph_api import Graph, fn

COLOURS = {"ok": "green", "absent": "dim", "warn": "yellow", "missing": "red"}


@dataclass
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``"ok"``, ``"absent"`` (not there, and not needed), ``"warn"`` (works, with a drawback) or
            ``"missing"``.
        found: what is there.
        advice: what to do, empty where nothing.
        required: whether Joestar cannot work without it.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    required: bool = False


def examine() -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [
        Check(*environment.python(), required=True),
        Check(*environment.pytorch(), required=True),
        Check(*environment.native_extension(), required=True),
        Check(*environment.threads()),
        Check(*environment.inductor_compiler()),
        Check(*environment.triton()),
        Check(*environment.cuda()),
        Check(*environment.gpus()),
        Check(*environment.host_memory()),
        Check(*environment.disk()),
        Check(*environment.optional("torch-geometric", "torch_geometric", "Graph.from_pyg and to_pyg")),
        Check(*environment.optional("pyg-lib", "pyg_lib", "comparisons in the benchmarks")),
        Check(*environment.optional("dgl", "dgl", "Graph.from_dgl and to_dgl")),
        Check(*environment.optional("ogb", "ogb", "downloads of OGB's datasets")),
        self_check(),
    ]


def self_check() -> Check:
    """Samples a block of a small graph and aggregates over it; compares with plain tensor operations."""
    try:
        problem = _sampled_block_problem()
    except Exception as error:  # whatever fails here is the finding
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return Check("self-check", "ok", "a sampled block was aggregated correctly", required=True)
    advice = "Reinstall Joestar; if that does not help, report this with the output of `joestar doctor --json`."
    return Check("self-check", "missing", problem, advice, required=True)


def failed(checks: list[Check]) -> bool:
    """True if something required is missing."""
    return any(check.required and check.status == "missing" for check in checks)


def as_json(checks: list[Check]) -> dict[str, Any]:
    """The findings as plain data."""
    return {"ok": not failed(checks), "checks": [asdict(check) for check in checks]}


def print_table(checks: list[Check], console: Console) -> None:
    """The findings as one table, and a closing sentence."""
    table = Table(title="joestar doctor", title_justify="left")
    for column in ("", "what", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        colour = COLOURS[check.status]
        advice = f"\n[{colour}]{escape(check.advice)}[/]" if check.advice else ""
        table.add_row(f"[{colour}]{check.status}[/]", check.name, escape(check.found) + advice)
    console.print(table)
    if failed(checks):
        console.print("[red]Something that Joestar needs is missing.[/]")
    else:
        console.print("[green]Joestar can run here.[/]")


def _sampled_block_problem() -> str | None:
    num_nodes, picks = 64, 3
    src = torch.arange(num_nodes).repeat_interleave(8)
    dst = (src + torch.arange(8).repeat(num_nodes) + 1) % num_nodes
    graph = Graph.from_edge_index(torch.stack([src, dst]), num_nodes).keyed(seed=1)
    block = graph[:, torch.arange(0, num_nodes, 4, dtype=graph.indices.dtype)].individual_sample(picks)
    if block.in_degrees().tolist() != [picks] * block.num_dst:
        return f"a block sampled {block.in_degrees().tolist()} neighbours, not {picks} each"
    sources = block.srcs.long()[block.indices.long()].view(-1, picks)
    distance = (block.dsts.long()[:, None] - sources) % num_nodes
    if not bool(((distance >= 1) & (distance <= 8)).all()):
        return "a block has edges that the graph does not have"
    x = torch.arange(num_nodes * 2, dtype=torch.float32).view(num_nodes, 2)
    pulled = block.pull(fn.copy_u(x[block.srcs.long()]), "mean")
    if not torch.allclose(pulled, x[sources].mean(1)):
        return "the aggregation over a block gives a wrong result"
    return None
