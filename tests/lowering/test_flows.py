"""Where gradients flow: what autograd says of ops on shapes is what it says of tensors."""

import pytest
import torch
from captures import cheaper, quick
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import joestar
from joestar.lowering.flows import flows, reaching
from lowering.harness import OLDER
from tests.runtime.common import FEATURES, planted_graph

OPS = {
    "zeros_like": lambda a, b: torch.zeros_like(a) + b,
    "new_full": lambda a, b: a.new_full((4, 3), 2.0) * b,
    "randn_like": lambda a, b: torch.randn_like(a) + b,
    "where": lambda a, b: torch.where(a > 0, b, 1.0),
    "where of both": lambda a, b: torch.where(a > 0, b, a),
    "detach": lambda a, b: a.detach() + b,
    "floor": lambda a, b: a.floor() + b,
    "sign": lambda a, b: a.sign() * b,
    "to integers": lambda a, b: a.to(torch.int64) * b,
    "to another dtype": lambda a, b: (a.to(torch.float64) + b).float(),
    "masked_fill": lambda a, b: b.masked_fill(a.isnan(), 0.0),
    "maximum": lambda a, b: b * a.max(1, keepdim=True).values,
    "its place": lambda a, b: b * a.max(1, keepdim=True).indices,
    "unbind": lambda a, b: a.detach().unbind(1)[0] + b.unbind(1)[2],
    "one of two": lambda a, b: torch.cat([torch.ones_like(a), b], 1).split(3, 1)[0],  # autograd: zeros for b, not None
    "searchsorted": lambda a, b: torch.searchsorted(a.sort(1).values, b).float(),
    "nan_to_num": lambda a, b: a.nan_to_num() + b.frexp().exponent,
    "layer_norm": lambda a, b: nn.functional.layer_norm(a, (3,), b[0], None),
    "mean of layer_norm": lambda a, b: torch.ops.aten.native_layer_norm(a, (3,), b[0], None, 1e-5)[1],
    "copysign": torch.copysign,
    **({} if OLDER else {"nextafter": torch.nextafter}),  # it had no derivative
    "bernoulli": lambda a, b: torch.bernoulli(a.sigmoid()) * b,
    "bfloat16": lambda a, b: a.bfloat16().float() + b.long(),
}


@pytest.mark.parametrize("name", OPS)
def test_what_flows_is_what_autograd_says(name):
    a, b = (torch.rand(4, 3).requires_grad_() for _ in "ab")
    graph = make_fx(OPS[name], tracing_mode="symbolic")(a.detach(), b.detach()).graph
    sources = graph.find_nodes(op="placeholder")
    (output,) = graph.find_nodes(op="output")
    found = set().union(*reaching(graph, sources).get(output.args[0], ()))
    result = OPS[name](a, b)
    wanted = [None, None]
    if result.requires_grad:
        wanted = torch.autograd.grad(result.sum(), (a, b), allow_unused=True)
    assert [source in found for source in sources] == [grad is not None for grad in wanted]


def test_every_operand_is_asked_for_itself():
    graph = make_fx(lambda a, b: torch.where(a > 0, b, a.new_ones(3)) * a, tracing_mode="fake")(
        torch.rand(4, 3), torch.rand(4, 3)
    ).graph
    product = next(node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    where, a = product.args
    assert flows(product, where) == flows(product, a) == (True,)
    condition, b, ones = where.args
    assert (flows(where, condition), flows(where, b), flows(where, ones)) == ((False,), (True,), (True,))


class Written(nn.Module):
    """Zeros like rows, written in place where no gradients are computed."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(FEATURES, 4)

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x)
        largest = torch.zeros_like(h)
        with torch.no_grad():
            largest.add_(h.abs().amax(1, keepdim=True))
        return h / (1 + largest)


def test_new_tensors_like_rows_may_be_written_under_no_grad():
    """They need no gradient: they were taken for values that do, and refused."""
    graph, net = planted_graph(nodes=400), Written()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), backend="eager")
    seeds = torch.arange(30)
    with cheaper(quick):
        out = step(seeds)
    sample = step.sampler.sample(graph.keyed(step.seed, 0, step._calls), seeds.to(graph.indices.dtype))
    expected = net(sample, graph.ndata["x"][sample[0].srcs])
    torch.testing.assert_close(out, expected)
    params = list(net.parameters())
    found, wanted = (torch.autograd.grad(rows.square().sum(), params) for rows in (out, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
