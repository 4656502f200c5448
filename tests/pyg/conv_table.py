"""Every convolution of ``torch_geometric.nn.conv`` under ``joestar.compile``, against PyG: the table of docs/pyg.md.

``PYTHONPATH=tests python -m pyg.conv_table --write`` makes it; with names of convolutions, tries only those.
"""

import copy
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch_geometric.nn import conv as convs

import joestar
from joestar.errors import JoestarError
from pyg.common import expected, toy_graph

SEGMENTS, SCATTERS, REFUSED = "segment ops", "scatters", "refused"
_SEEDS = torch.tensor([3, 17, 40, 5, 59, 8, 22, 31])


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


class _WithFirst(nn.Module):
    """A layer that also takes the features of the input."""

    def __init__(self, conv):
        super().__init__()
        self.lin, self.conv = nn.Linear(8, 8), conv

    def forward(self, x, edge_index):
        x = self.lin(x)
        return self.conv(x.relu(), x, edge_index)


class _Several(nn.Module):
    """A layer that takes a list of earlier rows."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(torch.stack([x, x.relu()], 1), edge_index)


class _Signed(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, edge_index):
        return self.conv(x, edge_index, edge_index)


@dataclass
class Case:
    """How a convolution is made and what it reads besides ``x`` and ``edge_index``."""

    make: object
    data: tuple[str, ...] = ()


W, A, T = ("edge_weight",), ("edge_attr",), ("edge_type",)
_DEGREES = torch.tensor([4, 9, 12, 8, 5, 2])
CASES = {
    "SimpleConv": Case(lambda c: _Head(c("mean", combine_root="sum"))),
    "GCNConv": Case(lambda c: c(8, 4), W),
    "ChebConv": Case(lambda c: c(8, 4, K=2)),
    "SAGEConv": Case(lambda c: c(8, 4, aggr=["mean", "max", "std"])),
    "GraphConv": Case(lambda c: c(8, 4), W),
    "GatedGraphConv": Case(lambda c: c(8, 2), W),
    "ResGatedGraphConv": Case(lambda c: c(8, 4, edge_dim=4), A),
    "GATConv": Case(lambda c: c(8, 4, heads=2, edge_dim=4), A),
    "GATv2Conv": Case(lambda c: c(8, 4, heads=2, edge_dim=4), A),
    "TransformerConv": Case(lambda c: c(8, 4, heads=2, edge_dim=4, beta=True), A),
    "AGNNConv": Case(lambda c: c()),
    "TAGConv": Case(lambda c: c(8, 4), W),
    "GINConv": Case(lambda c: c(_mlp(8, 4), train_eps=True)),
    "GINEConv": Case(lambda c: c(_mlp(8, 4), edge_dim=4), A),
    "ARMAConv": Case(lambda c: c(8, 4, num_stacks=2, num_layers=2), W),
    "SGConv": Case(lambda c: c(8, 4, K=2), W),
    "SSGConv": Case(lambda c: c(8, 4, alpha=0.1, K=2), W),
    "APPNP": Case(lambda c: _Head(c(K=2, alpha=0.1))),
    "MFConv": Case(lambda c: c(8, 4)),
    "RGCNConv": Case(lambda c: c(8, 4, num_relations=3), T),
    "FastRGCNConv": Case(lambda c: c(8, 4, num_relations=3), T),
    "RGATConv": Case(lambda c: c(8, 4, num_relations=3), T),
    "SignedConv": Case(lambda c: _Signed(c(8, 4, first_aggr=True))),
    "DNAConv": Case(lambda c: _Several(c(8))),
    "PointNetConv": Case(lambda c: c(_mlp(11, 8), _mlp(8, 4)), ("pos",)),
    "GMMConv": Case(lambda c: c(8, 4, dim=4, kernel_size=3), A),
    "NNConv": Case(lambda c: c(8, 4, _mlp(4, 32)), A),
    "CGConv": Case(lambda c: c(8, dim=4, batch_norm=True), A),
    "EdgeConv": Case(lambda c: c(_mlp(16, 4))),
    "PPFConv": Case(lambda c: c(_mlp(12, 8), _mlp(8, 4)), ("pos", "normal")),
    "FeaStConv": Case(lambda c: c(8, 4, heads=2)),
    "PointTransformerConv": Case(lambda c: c(8, 4), ("pos",)),
    "LEConv": Case(lambda c: c(8, 4), W),
    "PNAConv": Case(
        lambda c: c(8, 4, ["mean", "max", "min", "std"], ["identity", "amplification"], _DEGREES, edge_dim=4), A
    ),
    "ClusterGCNConv": Case(lambda c: c(8, 4, diag_lambda=0.5)),
    "GENConv": Case(lambda c: c(8, 4, learn_t=True, edge_dim=4), A),
    "GCN2Conv": Case(lambda c: _WithFirst(c(8, alpha=0.1, theta=0.5, layer=1))),
    "WLConvContinuous": Case(lambda c: _Head(c()), W),
    "FiLMConv": Case(lambda c: c(8, 4)),
    "SuperGATConv": Case(lambda c: c(8, 4, heads=2)),
    "FAConv": Case(lambda c: _WithFirst(c(8))),
    "EGConv": Case(lambda c: c(8, 4, aggregators=["sum", "max", "std"], num_heads=2)),
    "PDNConv": Case(lambda c: c(8, 4, edge_dim=4, hidden_channels=8), A),
    "GeneralConv": Case(lambda c: c(8, 4, in_edge_channels=4, attention=True), A),
    "HEATConv": Case(lambda c: c(8, 4, 2, 3, 4, 4, 4, heads=2), ("node_type", "edge_type", "edge_attr")),
    "LGConv": Case(lambda c: _Head(c()), W),
    "PointGNNConv": Case(lambda c: c(_mlp(8, 3), _mlp(11, 8), _mlp(8, 8)), ("pos",)),
    "GPSConv": Case(lambda c: c(8, convs.GCNConv(8, 8), heads=2)),
    "AntiSymmetricConv": Case(lambda c: c(8, num_iters=2)),
    "DirGNNConv": Case(lambda c: c(convs.SAGEConv(8, 4))),
    "MixHopConv": Case(lambda c: c(8, 4), W),
}
OTHERS = {
    "CuGraphSAGEConv": "needs pylibcugraphops", "CuGraphGATConv": "needs pylibcugraphops",
    "CuGraphRGCNConv": "needs pylibcugraphops", "FusedGATConv": "needs dgNN", "SplineConv": "needs pyg-lib",
    "PANConv": "needs torch-sparse", "WLConv": "a Python loop over nodes; nothing to train",
    "GravNetConv": "builds its own graph by nearest neighbours", "DynamicEdgeConv": "builds its own graph",
    "XConv": "builds its own graph", "HypergraphConv": "takes a hypergraph", "MeshCNNConv": "takes a mesh",
    "HGTConv": "takes several types of nodes", "HeteroConv": "takes several types of nodes",
    "HANConv": "takes several types of nodes",
}  # fmt: skip
"""Those that are called with something else than one set of edges."""


class _Head(nn.Module):
    """A layer without parameters between two products."""

    def __init__(self, conv):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(8, 8), conv, nn.Linear(8, 4)

    def forward(self, x, edge_index, edge_weight=None):
        given = () if edge_weight is None else (edge_weight,)
        return self.last(self.conv(self.first(x), edge_index, *given))


def tried(name: str) -> tuple[str, str, float]:
    """(outcome, what else there is to say, largest deviation from PyG of outputs and gradients)."""
    case = CASES[name]
    graph = toy_graph([n for n in case.data if n.startswith("edge_")], [n for n in case.data if "edge_" not in n])
    torch.manual_seed(0)
    model = case.make(getattr(convs, name)).double()
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=1)
    step = joestar.compile(model, sampler, backend="eager", warm_up=3)
    try:
        found = step(_SEEDS)
    except JoestarError as error:
        return REFUSED, " ".join(str(error).split()), 0.0
    ours = _results(found, model)
    other = copy.deepcopy(model)
    theirs = _results(expected(other, sampler, _SEEDS, (1, 0, 1), case.data), other)
    program = step._executor("logits" if model.training else "predict").program
    (exact,), _ = program.exact(_SEEDS.to(graph.indices.dtype), torch.tensor([1, 0, 1]))
    off = _deviation([*ours, *_results(exact, model)], [*theirs, *theirs])
    targets = {str(node.target) for node in program.captured.gm.graph.nodes}
    left = sorted({t.split(".")[1] for t in targets if t.startswith(("aten.scatter_", "aten.index_add"))})
    return (SCATTERS, ", ".join(left), off) if left else (SEGMENTS, "", off)


def _results(output, model) -> list[torch.Tensor]:
    """The output, and gradients of all parameters of a sum of it with weights."""
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad((output * weight).sum(), parameters, allow_unused=True)
    return [output.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


def _deviation(ours: list, theirs: list) -> float:
    pairs = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return float(torch.stack(pairs).max())  # Python's ``max`` passes over NaN


PAGE = Path(__file__).parents[2] / "docs" / "pyg.md"
_BEGIN = "<!-- made by: PYTHONPATH=tests python -m pyg.conv_table --write -->\n\n"
_HOW = {
    SEGMENTS: "compiled: every reduction is a segment op",
    SCATTERS: "compiled; some reductions stay scatters",
    REFUSED: "refused",
}
_WHY = {
    "GPSConv": "attention among all nodes of a batch, padded by a size that depends on data",
    "SuperGATConv": "while training, edges that are not there are drawn at random",
}
"""What a refusal says, in a few words."""


def table(outcomes: dict[str, str]) -> str:
    """The table of the page, from what became of each convolution."""
    lines = ["| convolution | what becomes of it | tried with | |", "|---|---|---|---|"]
    for name in sorted([*CASES, *OTHERS]):
        if name in OTHERS:
            lines.append(f"| `{name}` | not tried | | {OTHERS[name]} |")
            continue
        data = ", ".join(f"`{key}`" for key in CASES[name].data)
        why = _WHY.get(name, "") if outcomes[name] == REFUSED else ""
        lines.append(f"| `{name}` | {_HOW[outcomes[name]]} | {data} | {why} |")
    counted = [list(outcomes.values()).count(how) for how in (SEGMENTS, SCATTERS, REFUSED)]
    lines += [
        "",
        f"{counted[0]} as segment ops, {counted[1]} with scatters, {counted[2]} refused, of {len(CASES)} tried.",
    ]
    return "\n".join(lines) + "\n"


def written() -> dict[str, str]:
    """Name -> outcome, as the page has them."""
    how = {text: outcome for outcome, text in _HOW.items()}
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {cells[0][3:-1]: how[cells[1]] for cells in rows if len(cells) > 1 and cells[1] in how}


def main(names: list[str]) -> None:
    """Prints what becomes of the named convolutions, or of all; ``--write``: puts it into the page."""
    warnings.simplefilter("ignore")
    outcomes, write = {}, names == ["--write"]
    for name in sorted(CASES) if write else names or sorted(CASES):
        outcome, remark, off = tried(name)
        assert off < 1e-8, (name, off)
        outcomes[name] = outcome
        print(f"{name}: {outcome} {remark} {off:.1e}", flush=True)
    if write:
        before = PAGE.read_text().partition(_BEGIN)[0]
        PAGE.write_text(before + _BEGIN + table(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
