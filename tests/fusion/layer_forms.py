"""Layers as people write them, for two questions: which passes take them, and are results and gradients PyTorch's?

``python -m fusion.layer_table --write`` puts the answer to the first into docs/passes.md; ``test_layer_forms.py`` asks
the second.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from joestar import Block, fn
from joestar import nn as jnn


def _linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class Form(nn.Module):
    """A layer ``[num_src, inputs]`` to ``[num_dst, outputs]``; ``initial`` are rows of ``outputs`` where it asks."""

    wants_initial = False


class Sage(Form):
    """``W_l mean_j x_j + W_r x_i``."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.left, self.right = _linear(inputs, outputs), _linear(inputs, outputs, False)

    def forward(self, block: Block, x):
        return self.left(block.pull(fn.copy_u(x), "mean")) + self.right(x[: block.num_dst])


class SageBias(Form):
    """The bias is a parameter of its own, inside of the sum."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.left, self.right = _linear(inputs, outputs, False), _linear(inputs, outputs, False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, block: Block, x):
        return self.left(block.pull(fn.copy_u(x), "mean")) + (self.right(x[: block.num_dst]) + self.bias)


class CatSage(Form):
    """``W [x_i, mean_j x_j]``, as in the paper."""

    neighbours_first = False

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.lin = _linear(2 * inputs, outputs)

    def forward(self, block: Block, x):
        parts = [x[: block.num_dst], block.pull(fn.copy_u(x), "mean")]
        return self.lin(torch.cat(parts[:: -1 if self.neighbours_first else 1], 1))


class CatSageSwapped(CatSage):
    """``W [mean_j x_j, x_i]``."""

    neighbours_first = True


class ResidualSage(Sage):
    """``x_i + W_l mean_j x_j + W_r x_i``; in the first layer the skip is a product as well."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.skip = nn.Identity() if inputs == outputs else _linear(inputs, outputs, False)

    def forward(self, block: Block, x):
        return self.skip(x[: block.num_dst]) + super().forward(block, x)


class Gcn(Form):
    """``joestar.nn.GCNConv``."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = jnn.GCNConv(inputs, outputs)

    def forward(self, block: Block, x):
        return self.conv(block, x)


class Gin(Form):
    """``MLP((1 + eps) x_i + sum_j x_j)`` with eps a number."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.mlp = nn.Sequential(_linear(inputs, outputs), nn.ReLU(), _linear(outputs, outputs))

    def forward(self, block: Block, x):
        return self.mlp(1.5 * x[: block.num_dst] + block.pull(fn.copy_u(x), "sum"))


class TrainedGin(Gin):
    """The same with eps trained."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, block: Block, x):
        return self.mlp((1 + self.eps) * x[: block.num_dst] + block.pull(fn.copy_u(x), "sum"))


class Film(Form):
    """``W x_i + mean_j relu(gamma_i * W_l x_j + beta_i)`` (Brockschmidt, 2020)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.lin, self.skip = _linear(inputs, outputs, False), _linear(inputs, outputs)
        self.film = _linear(inputs, 2 * outputs)

    def forward(self, block: Block, x):
        own = x[: block.num_dst]
        beta, gamma = self.film(own).chunk(2, 1)
        return self.skip(own) + block.pull(
            lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).relu(), "mean",
            src={"h": self.lin(x)}, dst={"g": gamma, "b": beta},
        )  # fmt: skip


class Gated(Form):
    """``W x_i + sum_j sigmoid(k_i + q_j) * v_j`` (Bresson and Laurent, 2017)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.key, self.query, self.value = (_linear(inputs, outputs) for _ in range(3))
        self.skip = _linear(inputs, outputs, False)

    def forward(self, block: Block, x):
        own = x[: block.num_dst]
        return self.skip(own) + block.pull(
            lambda edges: torch.sigmoid(edges.dst["k"] + edges.src["q"]) * edges.src["v"], "sum",
            src={"q": self.query(x), "v": self.value(x)}, dst={"k": self.key(own)},
        )  # fmt: skip


class GateOfOwn(Sage):
    """``g * h + (1 - g) * x_i`` with ``g`` a gate of both (Li et al., 2016)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.gate, self.skip = _linear(2 * outputs, outputs), _linear(inputs, outputs)

    def forward(self, block: Block, x):
        h, own = super().forward(block, x), self.skip(x[: block.num_dst])
        g = self.gate(torch.cat([h, own], 1)).sigmoid()
        return g * h + (1 - g) * own


class Gcn2(Form):
    """``((1 - b) I + b W) ((1 - a) P x + a x_0)`` (Chen et al., 2020), ``x_0`` the first rows; no loops."""

    wants_initial, loops = True, False

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.alpha, self.beta = 0.1, 0.4
        self.lin = _linear(outputs, outputs, False)

    def forward(self, block: Block, x, initial):
        looped = block.add_self_loops() if self.loops else block
        left, right = (d.clamp(min=1).to(x.dtype).rsqrt()[:, None] for d in (looped.out_degrees(), looped.in_degrees()))
        near = looped.pull(fn.copy_u(x * left), "sum") * right
        h = (1 - self.alpha) * near + self.alpha * initial[: block.num_dst]
        return (1 - self.beta) * h + self.beta * self.lin(h)


class Gcn2Loops(Gcn2):
    """The same with self-loops."""

    loops = True


class LoopedMean(Form):
    """``W mean_j x_j`` with self-loops."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.lin = _linear(inputs, outputs)

    def forward(self, block: Block, x):
        return self.lin(block.add_self_loops().pull(fn.copy_u(x), "mean"))


class Deviation(Form):
    """``W_l [mean, std] + W_r x_i``."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.left, self.right = _linear(2 * inputs, outputs), _linear(inputs, outputs, False)

    def forward(self, block: Block, x):
        mean, square = (block.pull(fn.copy_u(rows), "mean") for rows in (x, x * x))
        std = (square - mean * mean).clamp(min=0).add(1e-5).sqrt()
        return self.left(torch.cat([mean, std], 1)) + self.right(x[: block.num_dst])


class PowerMean(Form):
    """``W_l (mean_j |x_j|^p)^(1/p) + W_r x_i`` with ``p`` trained."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.left, self.right = _linear(inputs, outputs), _linear(inputs, outputs, False)
        self.p = nn.Parameter(torch.tensor(2.0))

    def forward(self, block: Block, x):
        power = (x.abs() + 1e-2) ** self.p
        return self.left(block.pull(fn.copy_u(power), "mean") ** (1 / self.p)) + self.right(x[: block.num_dst])


class Several(Form):
    """PNA: mean, maximum, minimum and deviation under two scalers."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.left, self.right = _linear(8 * inputs, outputs), _linear(inputs, outputs, False)

    def forward(self, block: Block, x):
        mean, most, least = (block.pull(fn.copy_u(x), reduce) for reduce in ("mean", "max", "min"))
        std = (block.pull(fn.copy_u(x * x), "mean") - mean * mean).clamp(min=0).add(1e-5).sqrt()
        rows = torch.cat([mean, most, least, std], 1)
        scale = (block.in_degrees() + 1).to(x.dtype).log()[:, None]
        return self.left(torch.cat([rows, rows * scale], 1)) + self.right(x[: block.num_dst])


class FactorBefore(Sage):
    """Messages are rows times a Python number."""

    def forward(self, block: Block, x):
        return self.left(block.pull(fn.copy_u(0.5 * x), "mean")) + self.right(x[: block.num_dst])


class FactorBehind(Sage):
    """The aggregate is divided by a Python number, own rows are multiplied by one."""

    def forward(self, block: Block, x):
        return self.left(block.pull(fn.copy_u(x), "sum") / 3) + self.right(x[: block.num_dst] * 0.5)


class FactorOfEdges(Sage):
    """A message function with Python numbers."""

    def forward(self, block: Block, x):
        near = block.pull(lambda edges: 0.5 * edges.src["h"] + 0.1, "mean", src={"h": x})
        return self.left(near) + self.right(x[: block.num_dst])


class ScoredEdges(Form):
    """Attention of two heads, whose scores read edge features."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv = jnn.GATConv(inputs, outputs // 2, heads=2, edge_dim=2, add_self_loops=False)

    def forward(self, block: Block, x):
        features = torch.stack([(block.eids % 7).to(x.dtype), (block.eids % 3).to(x.dtype)], 1)
        return self.conv(block, x, features)


ACTIVATIONS = {
    "relu": F.relu, "elu": F.elu, "gelu": F.gelu, "silu": F.silu, "leaky": F.leaky_relu, "tanh": torch.tanh,
}  # fmt: skip


class Net(nn.Module):
    """Layers of one form; activation, norm and dropout in between, and a classifier.

    Args:
        form: the class of the layers; activation: a key of ``ACTIVATIONS``; norm: ``None``, ``"layer"``, ``"batch"``.
        jump: the classifier reads what every layer made of the seeds.
    """

    def __init__(self, form, inputs: int, hidden: int, classes: int, layers: int = 2, activation: str = "relu",
                 norm: str | None = None, dropout: float = 0.5, jump: bool = False):  # fmt: skip
        super().__init__()
        widths = [hidden if form.wants_initial else inputs] + [hidden] * layers
        self.begin = _linear(inputs, hidden) if form.wants_initial else nn.Identity()
        self.convs = nn.ModuleList([form(*pair) for pair in itertools.pairwise(widths)])
        norms = {None: nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norms = nn.ModuleList([norms[norm](hidden) for _ in range(layers)])
        self.classify = _linear(hidden * (layers if jump else 1), classes)
        self.activation, self.dropout, self.jump, self.wants_initial = activation, dropout, jump, form.wants_initial

    def forward(self, blocks: list[Block], x):
        """Logits of the seeds."""
        x, of_seeds = self.begin(x), []
        initial = (x,) if self.wants_initial else ()
        for conv, norm, block in zip(self.convs, self.norms, blocks, strict=True):
            x = ACTIVATIONS[self.activation](norm(conv(block, x, *initial)))
            x = F.dropout(x, self.dropout, self.training)
            of_seeds.append(x[: blocks[-1].num_dst])
        return self.classify(torch.cat(of_seeds, 1) if self.jump else x)


FORMS = {
    "SAGE, ReLU": (Sage, {}),
    "SAGE, no dropout": (Sage, {"dropout": 0.0}),
    "SAGE, ELU": (Sage, {"activation": "elu"}),
    "SAGE, GELU and LayerNorm": (Sage, {"activation": "gelu", "norm": "layer"}),
    "SAGE, SiLU and BatchNorm": (Sage, {"activation": "silu", "norm": "batch"}),
    "SAGE, ReLU and LayerNorm": (Sage, {"norm": "layer"}),
    "SAGE, a bias of its own": (SageBias, {}),
    "cat-SAGE, `lin(cat([x, agg]))`": (CatSage, {}),
    "cat-SAGE, `lin(cat([agg, x]))`": (CatSageSwapped, {}),
    "SAGE with residuals": (ResidualSage, {}),
    "SAGE, jumping knowledge": (Sage, {"jump": True}),
    "GCN": (Gcn, {}),
    "mean with self-loops": (LoopedMean, {}),
    "GIN, eps a number": (Gin, {}),
    "GIN, eps trained": (TrainedGin, {}),
    "FiLM": (Film, {}),
    "gates per edge": (Gated, {}),
    "gates per node": (GateOfOwn, {}),
    "GCNII": (Gcn2, {}),
    "GCNII, self-loops": (Gcn2Loops, {}),
    "mean and deviation": (Deviation, {}),
    "power mean": (PowerMean, {}),
    "PNA": (Several, {}),
    "messages times a number": (FactorBefore, {}),
    "aggregate over a number": (FactorBehind, {}),
    "message function with numbers": (FactorOfEdges, {}),
    "GAT, edge features": (ScoredEdges, {}),
}
"""Name -> (class of the layers, options of ``Net``)."""
