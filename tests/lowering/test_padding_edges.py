"""Edge values and chains of ops whose padding is unlike any real row: padded equals exact and eager."""

import pytest
import torch
from torch import nn

from joestar import fn
from joestar.fusion import PASSES
from joestar.graph_api import Graph

from .harness import NUM_CLASSES, NUM_FEATURES, NUM_NODES, Heads, check, curved

pytestmark = pytest.mark.usefixtures("quick_captures")


def stamped() -> Graph:
    """Edges with a score of about 3,000 (its power is infinite in float64) and a time of about 1.6e9, nodes with a time
    that is at most a minute later."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(0, NUM_NODES, (2, 170), generator=generator)
    noise = torch.randn(2, 170, generator=generator, dtype=torch.float64)
    x = torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (NUM_NODES,), generator=generator)
    time = 1.6e9 + 60 * torch.rand(NUM_NODES, generator=generator, dtype=torch.float64)
    edata = {"score": 3000 + noise[0], "time": 1.6e9 + 10 * noise[1]}
    return Graph.from_edge_index(edges, NUM_NODES, {"x": x, "y": y, "time": time}, edata)


def scores(m, b) -> torch.Tensor:
    return b.edata["score"] * m.scale


def softmax_by_hand(m, b, h):
    e = scores(m, b)
    power = (e - b.apply_edges(fn.copy_v(b.pull(fn.copy_e(e.detach()), "max")))).exp()
    return power / b.apply_edges(fn.copy_v(b.pull(fn.copy_e(power), "sum")))


def against_the_edges(m, b, h):
    return b.reverse().edge_softmax(scores(m, b))


def log_softmax_by_hand(m, b, h):
    e = scores(m, b)
    top = b.pull(fn.copy_e(e.detach()), "max")
    shifted = e - b.apply_edges(fn.copy_v(top))
    return shifted - b.apply_edges(fn.copy_v(b.pull(fn.copy_e(shifted.exp()), "sum"))).log()


def age(b) -> torch.Tensor:
    """Seconds between an edge and its destination; the padded ones are 1.6e9 seconds old."""
    return (b.apply_edges(fn.copy_v(b.graph.ndata["time"][b.dsts])) - b.edata["time"]) / 10


WEIGHTS = {
    "softmax by hand": softmax_by_hand,
    "reversed": against_the_edges,
    "log softmax by hand": log_softmax_by_hand,
    "decay": lambda m, b, h: (-age(b) * m.scale).exp(),
    "growth": lambda m, b, h: (age(b) * m.scale).cosh() * 0.01,
    "power": lambda m, b, h: 1.01 ** (age(b) * m.scale),
    "polynomial": lambda m, b, h: (lambda t: t + t * t + t * t * t * t * t * t * t + t**9)(age(b) * m.scale * 0.1),
    "powers of powers": lambda m, b, h: ((((age(b) * m.scale * 0.1) ** 2) ** 4) ** 8 + 1).log(),
    "distance": lambda m, b, h: (b.apply_edges(fn.u_sub_v(h, h[: b.num_dst])).square().sum(1) + 1).rsqrt() * m.scale,
    "gaussian": lambda m, b, h: (-b.apply_edges(fn.u_sub_v(h, h[: b.num_dst])).norm(dim=1) * m.scale).exp(),
    "inverse age": lambda m, b, h: 1 / (age(b) * m.scale).square(),
}


def weighted(f):
    """An operation on source rows: their sums under the weights, and the weights as features of a product."""

    def operation(m, b, h):
        e = f(m, b, h)
        return h + b.pull(fn.u_mul_e(h, e), "sum").sum(0) + m.mix(e[:, None] * 0.1).mean(0)

    return operation


@pytest.mark.every(2)
@pytest.mark.parametrize("disable", [(), tuple(spec.name for spec in PASSES)], ids=["fused", "as written"])
def test_weights_of_edges(disable):
    """What is fused reads no padding, so that only the other form shows what rules make of it."""
    parts = {"scale": nn.Parameter(torch.ones(())), "mix": nn.Linear(1, 8)}
    check(
        Heads({name: weighted(f) for name, f in WEIGHTS.items()}, **parts),
        loss=curved,
        graph=stamped(),
        disable=disable,
    )
