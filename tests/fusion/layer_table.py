"""Which passes take which layers, on a GPU, and what is left: the table of docs/passes.md.

``PYTHONPATH=tests python -m fusion.layer_table --write`` makes it; with names of forms, it prints only those.
"""

import copy
import functools
import operator
import sys
from pathlib import Path

import torch
from captures import cheaper, cheapest
from torch import fx

import joestar
from fusion.layer_forms import FORMS, Net
from joestar.fusion import PASSES, run_passes
from joestar.lowering.rules.arguments import argument
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

SEEDS, FANOUTS, FEATURES, HIDDEN, CLASSES = 100, [10, 5], 100, 128, 47
LARGER = 100
"""Passes weigh costs as if every set had so many times as many nodes and edges."""
WEIGHTED = " (weighted picks)"
NAMES = (*FORMS, "SAGE, ReLU" + WEIGHTED, "GCNII, self-loops" + WEIGHTED)
_PLAIN = {"dce", "simplify", "cse", "dce-after", "hoist", "extract-select", "join-together", "backward-format"}
_IN_PLACE = {"sample_aggregate", "sample_aggregate_cat", "sample_aggregate_own"}
_GRADIENTS = {
    "spmm": "spmm_grad_x", "aggregate_cat": "aggregate_cat_grad", "aggregate_cat_kept": "aggregate_cat_kept_grad",
    "aggregate_rows": "aggregate_rows_grad", "aggregate_rows_kept": "aggregate_rows_kept_grad",
    "aggregate_activated": "aggregate_activated_grad",
    "multi_aggregate": "multi_aggregate_grad", "segment": "segment_grad", "attend": "attend_grad",
    "attend_own": "attend_own_grad",
}  # fmt: skip


@functools.cache
def graph() -> joestar.Graph:
    """6,000 nodes of degree 50, 100 features each: widths and degrees of ogbn-products."""
    random = torch.Generator().manual_seed(0)
    nodes, edges = 6000, 300_000
    made = joestar.Graph.from_edge_index(
        torch.randint(0, nodes, (2, edges), generator=random), nodes,
        ndata={"x": torch.randn(nodes, FEATURES, generator=random), "y": torch.arange(nodes) % CLASSES},
    )  # fmt: skip
    made.edata["w"] = torch.rand(edges, generator=random) + 0.1
    return made


def rewritten(name: str, device: str = "cuda") -> tuple[fx.Graph, dict[str, int]]:
    """(the program of a form behind the passes, under the choices of a device; pass -> its rewrites)."""
    form, options = FORMS[name.removesuffix(WEIGHTED)]
    model = Net(form, FEATURES, HIDDEN, CLASSES, **options).train()
    sampler = joestar.NeighborSampler(graph(), FANOUTS, probs="w" if name.endswith(WEIGHTED) else None)
    every = tuple(spec.name for spec in PASSES)
    program = Program("train", model, sampler, torch.nn.functional.cross_entropy, Options("eager", every))
    seeds = torch.arange(SEEDS, dtype=graph().indices.dtype)
    with cheaper(cheapest):
        program.trace(seeds, step_key(seed=0, epoch=0, step=0, device="cpu"))
    gm = fx.GraphModule(program.captured.gm, copy.deepcopy(program.lowered))
    sizes = {symbol: LARGER * size for symbol, size in program.sizes.items()}
    records, _ = run_passes(gm, list(program.lowered_roles), sizes=sizes, device=device, texts=False)
    return gm.graph, {record.name: record.rewrites for record in records if record.rewrites}


def _op(node: fx.Node) -> str:
    return str(node.target).removeprefix("joestar.").removesuffix(".default")


def first_layer(nodes: list[fx.Node]) -> str:
    """How the rows of the features are read."""
    table = next(node for node in nodes if node.name == "features")
    readers, found = {_op(user) for user in table.users}, []
    if readers & _IN_PLACE:
        found.append("in place, while sampling")
    if readers & {"spmm", "multi_aggregate", "segment", "gather_attend_linear"}:
        found.append("in place")
    if readers & {"gather_linear", "gather_linears"}:
        found.append("by products, in place")
    if any(_gathers_sources(user) for user in table.users):
        found.append("**gathered**")
    return "; ".join(found)


def _gathers_sources(node: fx.Node) -> bool:
    """Whether a node stores the rows of all sources (own rows alone are read by the backend's loops)."""
    if node.target is not torch.ops.aten.index_select.default:
        return False
    ids = node.args[2]
    return ids.name != "seeds" and not any("sample" in _op(user) and user.args[2] is ids for user in ids.users)


def inner_layer(nodes: list[fx.Node]) -> str:
    """The op that aggregates the rows of a layer, and its gradient."""
    found = {_op(node) for node in nodes if _op(node) in _GRADIENTS and not _reads_features(node)}
    return ", ".join(f"`{op}`, `{_GRADIENTS[op]}`" for op in sorted(found))


def _reads_features(node: fx.Node) -> bool:
    return any(source.name == "features" for source in node.all_input_nodes)


def activation(nodes: list[fx.Node]) -> str:
    """Where activation and dropout of inner rows happen."""
    ops = {_op(node): node for node in nodes}
    if (fused := ops.get("aggregate_activated")) is not None:
        return "where rows are read" + (", the norm as well" if argument(fused, "eps") else "")
    return "where rows are read" if {"aggregate_cat_kept", "aggregate_rows_kept"} & set(ops) else "a pass of their own"


def row(name: str) -> str:
    """The line of a form."""
    made, rewrites = rewritten(name)
    nodes = [node for node in made.nodes if node.target is not operator.getitem]
    fired = ", ".join(f"{key}{f' {n}' if n > 1 else ''}" for key, n in rewrites.items() if key not in _PLAIN)
    return f"| {name} | {first_layer(nodes)} | {inner_layer(nodes)} | {activation(nodes)} | {fired} |"


PAGE = Path(__file__).parents[2] / "docs" / "passes.md"
_BEGIN = "<!-- made by: PYTHONPATH=tests python -m fusion.layer_table --write -->\n\n"
_END = "\n<!-- end -->\n"
_HEAD = [
    "| layers | rows of features are read | inner aggregation, its gradient | activation, dropout | passes |",
    "|---|---|---|---|---|",
]


def written() -> list[str]:
    """The lines of the page's table."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0].splitlines()[len(_HEAD) :]


def main(names: list[str]) -> None:
    """Prints the lines of the named forms, or of all; ``--write``: puts them into the page."""
    write = names == ["--write"]
    lines = [row(name) for name in (NAMES if write else names or NAMES)]
    print("\n".join(lines))
    if write:
        before, _, behind = PAGE.read_text().partition(_BEGIN)
        PAGE.write_text(before + _BEGIN + "\n".join([*_HEAD, *lines]) + _END + behind.partition(_END)[2])


if __name__ == "__main__":
    main(sys.argv[1:])
