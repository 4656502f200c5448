"""Layers with messages of their own, and the program that each is."""

import torch
import torch.nn.functional as F
from lowering.harness import NUM_CLASSES, NUM_FEATURES, small_graph
from torch import nn

import joestar
from joestar import fn

HEADS, WIDTH = 2, 3


def graph(**ndata):
    """With three features and a weight per edge."""
    made = small_graph()
    generator = torch.Generator().manual_seed(2)
    made.edata["f"] = torch.randn(made.num_edges, 3, generator=generator, dtype=torch.float64)
    made.edata["w"] = torch.rand(made.num_edges, generator=generator, dtype=torch.float64)
    for name, value in ndata.items():
        made.ndata[name] = value
    return made


class Net(nn.Module):
    """A layer per block of ``layer(self, block, h, own)``, with what it may need; features keep their width."""

    def __init__(self, layer, layers: int = 1):
        super().__init__()
        self.layer, self.layers = layer, layers
        self.lin = nn.Linear(3, NUM_FEATURES)
        self.plain = nn.Linear(3, NUM_FEATURES, bias=False)
        self.dst, self.mix = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.wide = nn.Linear(17, NUM_FEATURES)
        self.bias, self.eps = nn.Parameter(torch.zeros(NUM_FEATURES)), nn.Parameter(torch.zeros(1))
        self.att = nn.Parameter(torch.zeros(1, HEADS, WIDTH))
        self.per_column = nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, blocks, x):
        for block in blocks:
            x = self.layer(self, block, x, x[: block.num_dst]) + self.eps * x[: block.num_dst]
            x = x if block is blocks[-1] else x.tanh()
        return self.head(x)


def pulled(message, reduce="sum"):
    """A layer that pulls a function of (model, edges)."""

    def layer(self, block, h, own):
        return block.pull(lambda edges: message(self, edges), reduce, src={"h": h}, dst={"g": own, "q": own[:, 0]})

    return layer


def edge_features(self, edges):
    return (edges.src["h"] + self.lin(edges.data["f"])).relu()


def split(rows):
    """Rows in heads."""
    return rows.unflatten(1, (HEADS, WIDTH))


def scores(self, block, h, own):
    """GATv2."""
    left = split(self.mix(h))
    pairs = F.leaky_relu(block.apply_edges(fn.u_add_v(left, split(self.dst(own)))), 0.2)
    alpha = block.edge_softmax((pairs * self.att).sum(-1))
    return block.pull(fn.u_mul_e(left, alpha), "sum").flatten(1)


def weighted_by(reduction):
    """Sums over the columns of a message, as weights of sources' rows."""

    def layer(self, block, h, own):
        values = reduction(self, block.apply_edges(fn.u_mul_v(self.mix(h), own)).tanh())
        return block.pull(fn.u_mul_e(h, values), "sum")

    return layer


def of_heads(self, block, h, own):
    """Messages with heads, in a mean."""
    value = block.apply_edges(fn.u_sub_v(split(self.mix(h)), split(own))).sigmoid()
    value = value * self.per_column + split(self.lin(block.edata["f"])) * block.edata["w"][:, None, None]
    return block.pull(fn.copy_e(value), "mean").flatten(1)


def two_widths(self, block, h, own):
    """Values of other readers are read where they are stored."""
    shared = block.apply_edges(fn.u_add_v(self.mix(h), own)).relu()
    gated = block.pull(lambda edges: edges.src["h"].sigmoid() * shared, "sum", src={"h": h})
    return gated + block.pull(fn.copy_e(self.dst(shared)), "mean")


def head_weights(self, block, h, own):
    """Weights of the aggregation of message's heads."""
    value = split(block.apply_edges(fn.u_add_v(self.mix(h), own)).tanh())
    weight = split(self.lin(block.edata["f"])).sum(-1)
    order = torch.arange(block.num_edges, dtype=block.indices.dtype)
    return torch.ops.joestar.spmm(block.indptr, order, value, weight, "sum").flatten(1)


def head_gates(self, block, h, own):
    """A gate per head, of sources and edges."""
    rows = block.apply_edges(fn.u_mul_v(split(self.mix(h)), split(own)))
    gate = block.apply_edges(fn.copy_u(self.eps * h[:, :HEADS])) + self.lin(block.edata["f"])[:, :HEADS]
    return block.pull(fn.copy_e(rows * gate.sigmoid()[..., None]), "sum").flatten(1)


def one_gate(self, block, h, own):
    """A number per source that all heads read: stored per edge, as leaves of ends have one per head at least."""
    rows = block.apply_edges(fn.u_sub_v(split(self.mix(h)), split(own)))
    gate = block.apply_edges(fn.copy_u(h[:, :1]))[..., None]
    return block.pull(fn.copy_e((rows * gate).tanh()), "sum").flatten(1)


def one_gate_of_pairs(self, block, h, own):
    """The same, of both ends."""
    rows = block.apply_edges(fn.copy_u(split(self.mix(h))))
    gate = block.apply_edges(fn.u_mul_v(h[:, :1], own[:, :1]))[..., None]
    return block.pull(fn.copy_e((rows + gate).sigmoid()), "mean").flatten(1)


def looped(self, block, h, own):
    block = block.add_self_loops()
    return block.pull(lambda edges: (edges.src["h"] - edges.dst["g"]).abs(), "mean", src={"h": h}, dst={"g": own})


LAYERS = {
    "edge features": (pulled(edge_features), "src narrow | add 0 1 | relu 2 -> sum 3"),
    "without a bias": (
        pulled(lambda self, e: e.src["h"] * self.plain(e.data["f"])), "src narrow_plain | mul 0 1 -> sum 2",
    ),
    "scores": (scores, "src dst vector | add 0 1 | leaky_relu 3 0.2 | mul 4 2 | total 5 -> edges 6, 2 heads"),
    "both ends": (
        pulled(lambda self, e: F.elu(e.src["h"] - e.dst["g"]) * 2 - 1, "mean"),
        "src dst | sub 0 1 | elu 2 1.0 | mul_scalar 3 2.0 | add_scalar 4 -1.0 -> mean 5",
    ),
    "a destination alone": (
        pulled(lambda self, e: e.dst["g"] * e.data["w"][:, None]), "dst scalar | mul 0 1 -> sum 2",
    ),
    "vectors": (
        pulled(lambda self, e: (3 - e.src["h"] * self.bias + self.eps).abs()),
        "src vector vector | mul 0 1 | neg 3 | add_scalar 4 3.0 | add 5 2 | abs 6 -> sum 7",
    ),
    "a value twice": (
        pulled(lambda self, e: F.silu(e.src["h"]) / (1 + e.src["h"] ** 2)),
        "src | silu 0 | mul 0 0 | add_scalar 2 1.0 | div 1 3 -> sum 4",
    ),
    "extrema": (
        pulled(lambda self, e: torch.maximum(e.src["h"], e.dst["g"]) - torch.minimum(e.src["h"], self.bias)),
        "src dst vector | maximum 0 1 | minimum 0 2 | sub 3 4 -> sum 5",
    ),
    "an alpha": (
        pulled(lambda self, e: torch.add(e.src["h"].exp(), e.dst["g"], alpha=-0.5)),
        "src dst | exp 0 | mul_scalar 1 -0.5 | add 2 3 -> sum 4",
    ),
    "a number per destination": (
        pulled(lambda self, e: (e.src["h"] * e.dst["q"][:, None]).tanh() / 4),
        "src dst_head | mul 0 1 | tanh 2 | mul_scalar 3 0.25 -> sum 4",
    ),
    "edge values": (
        pulled(lambda self, e: e.src["h"] * self.mix(e.src["h"]).softmax(1)), "src edge | mul 0 1 -> sum 2",
    ),
    "heads": (
        of_heads,
        "scalar src dst vector narrow | sub 1 2 | sigmoid 5 | mul 6 3 | mul 4 0 | add 7 8 -> mean 9, 2 heads",
    ),
    "one sum of all columns": (
        weighted_by(lambda self, m: m.sum(-1)), "src dst | mul 0 1 | tanh 2 | total 3 -> edges 4",
    ),
    "a sum of columns kept": (
        weighted_by(lambda self, m: split(m).sum(2, keepdim=True).flatten(1).mean(1)),
        "src dst | mul 0 1 | tanh 2 | total 3 -> edges 4, 2 heads",
    ),
    "self-loops": (looped, "src dst | sub 0 1 | abs 2 -> mean 3"),
    "weights outside": (
        pulled(lambda self, e: (e.src["h"] - e.dst["g"]).abs() * e.data["w"][:, None]),
        "scalar src dst | sub 1 2 | abs 3 | mul 4 0 -> sum 5",
    ),
    "weights of heads": (head_weights, "src dst edge_head | add 0 1 | tanh 3 | mul 4 2 -> sum 5, 2 heads"),
    "gates of heads": (
        head_gates, "src dst src_head edge_head | mul 0 1 | add 2 3 | sigmoid 5 | mul 4 6 -> sum 7, 2 heads",
    ),
    "a gate of all heads": (one_gate, "src dst scalar | sub 0 1 | mul 3 2 | tanh 4 -> sum 5, 2 heads"),
    "a gate of both ends": (one_gate_of_pairs, "src scalar | add 0 1 | sigmoid 2 -> mean 3, 2 heads"),
    "a shared value": (two_widths, "edge src | sigmoid 1 | mul 2 0 -> sum 3"),
}  # fmt: skip
"""Name -> (layer, the text of its program and the reduction)."""


def trained_under_autocast(layer, kind: str, choice: str) -> torch.Tensor:
    """Losses of three steps in bfloat16, of two layers whose places of this kind take this choice."""
    data = graph(x=small_graph().ndata["x"].float())
    data.edata["f"] = data.edata["f"].float()
    torch.manual_seed(0)
    net = Net(layer, 2)
    step = joestar.compile(
        net, joestar.NeighborSampler(data, [3, 2]), F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1),
        backend="eager", autocast=torch.bfloat16, choices={f"{kind}:hop{hop}": choice for hop in range(2)},
    )  # fmt: skip
    return torch.stack([loss.clone() for loss in step.epoch(torch.arange(30), 10)])
