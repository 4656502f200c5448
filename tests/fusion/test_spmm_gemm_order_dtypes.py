"""SpMM/GEMM order: dtypes are PyTorch's in either order, under autocast and with values that are wider than rows."""

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, seeded, small_graph
from torch import nn

import joestar
from joestar import fn
from joestar.fusion.order.spmm_gemm_order import AGGREGATE, UPDATE
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .graphs import degree_weights


class TwoProducts(nn.Module):
    """``form(block, rows)`` behind a product with a bias, twice."""

    def __init__(self, form):
        super().__init__()
        self.form, self.first, self.second = form, nn.Linear(NUM_FEATURES, 8), nn.Linear(8, 4)

    def forward(self, blocks, x):
        x = self.form(blocks[0], self.first(x)).relu()
        return self.form(blocks[1], self.second(x.to(self.second.weight.dtype)))


HANDED_OUT = {
    "sum": lambda block, h: block.pull(fn.copy_u(h), "sum"),
    "mean": lambda block, h: block.pull(fn.copy_u(h), "mean"),
    "weights": lambda block, h: block.pull(fn.u_mul_e(h, degree_weights(block).float()), "sum"),
    "weights in 16 bits": lambda block, h: block.pull(fn.u_mul_e(h, degree_weights(block).to(h.dtype)), "sum"),
    "factor": lambda block, h: block.pull(fn.copy_u(h * block.out_degrees()[:, None].to(h.dtype)), "sum"),
    "own rows": lambda block, h: (
        block.pull(fn.copy_u(h * block.out_degrees()[:, None].to(h.dtype)), "sum") + h[: block.num_dst]
    ),
}


@pytest.mark.parametrize("order", [AGGREGATE, UPDATE])
@pytest.mark.parametrize("form", HANDED_OUT)
def test_rows_that_are_handed_out_have_pytorchs_dtype(form, order):
    """Under autocast a bias is in float32, beside products in 16 bits."""

    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model, sampler = seeded(TwoProducts(HANDED_OUT[form])).float(), joestar.NeighborSampler(graph, [3, 2])
    choices = {f"order:model_{name}_weight": order for name in ("first", "second")}
    options = Options("eager", ("multi-aggregate", "number-factors"), torch.bfloat16, choices)
    program = Program("logits", model, sampler, None, options)
    seeds, key = torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu")
    program.trace(seeds, key)
    y = program.exact(seeds, key)[0][0].detach()
    blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(blocks, graph.ndata["x"][blocks[0].srcs]).detach()
    assert [site.taken for site in program.sites if site.kind == "order"] == [order, order]
    assert y.dtype == expected.dtype
    assert (y - expected).abs().max() <= 0.03 * expected.abs().max()


def _through_index_add(block, h):
    """Behind the aggregation a call that takes one dtype only."""
    y = block.pull(fn.u_mul_e(h, degree_weights(block).to(h.dtype)), "sum")
    return torch.zeros(y.shape, dtype=y.dtype).index_add(0, torch.arange(y.shape[0]), y)


def _own_rows_through_index_add(block, h):
    h = h * (block.out_degrees().to(h.dtype)[:, None] + 1)
    own = h[: block.num_dst]
    return block.pull(fn.copy_u(h), "mean") + torch.zeros(own.shape, dtype=h.dtype).index_add(
        0, torch.arange(own.shape[0]), own
    )


WIDTHS = {
    "a factor in float64": lambda block, h: block.pull(fn.copy_u(h * block.out_degrees().double()[:, None]), "sum"),
    "weights in float64": lambda block, h: block.pull(fn.u_mul_e(h, degree_weights(block).double()), "mean"),
    "index_add": _through_index_add,
    "index_add of own rows": _own_rows_through_index_add,
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", WIDTHS)
def test_training_in_the_dtypes_that_pytorch_has(form, autocast):
    """Products in float32 with biases, factors and weights of other widths: they were compiled to what cannot run."""

    def loss(z, y):
        return nn.functional.cross_entropy(z.float(), y)

    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model, sampler = seeded(TwoProducts(WIDTHS[form])).float(), joestar.NeighborSampler(graph, [3, 2])
    program = Program("train", model, sampler, loss, Options("eager", (), autocast))
    seeds, key = torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu")
    program.trace(seeds, key)
    got = program.exact(seeds, key)[0][0]
    blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        expected = loss(model(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][seeds])
    assert abs(got.item() - expected.item()) <= (1e-5 if autocast is None else 0.05) * abs(expected.item())
