"""Capture: sampling and model become one graph of aten and joestar ops with symbolic sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import joestar.nn as jnn
from joestar import fn
from joestar.lowering import inputs
from joestar.lowering.sizes import expression, size_table
from joestar.lowering.verify import foreign_nodes, namespace

from .harness import NUM_CLASSES, NUM_FEATURES, NUM_NODES, SEEDS, WIDTH, Case, Rows, check, small_graph

MODELS = {
    "sage": lambda: jnn.GraphSAGE(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="batch_norm", dropout=0.5),
    "gcn": lambda: jnn.GCN(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, dropout=0.5),
    "gat": lambda: jnn.GAT(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, heads=2, dropout=0.5),
    "gin": lambda: jnn.GIN(NUM_FEATURES, WIDTH, 2, NUM_CLASSES, norm="layer_norm"),
}


class FrontierSampler:
    """A user's sampler: every edge of what a first sample found, then a sample with replacement."""

    def __init__(self, graph):
        self.graph = graph

    def sample(self, graph, seeds):
        near = graph[:, seeds].individual_sample(2, replace=True)
        far = graph[:, near.srcs].compact()
        return [far, near]


class Gated(nn.Module):
    """A user's model: plain PyTorch over blocks, sizes in arithmetic, Python loops and containers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)])
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.scale = 0.5

    def forward(self, blocks, x):
        self.seen.add_(blocks[-1].num_dst)
        outputs = {}
        for depth, (block, layer) in enumerate(zip(blocks, self.layers, strict=True)):
            x = layer(x)
            gate = torch.sigmoid(block.apply_edges(fn.u_dot_v(x, x[: block.num_dst])))
            x = block.pull(fn.u_mul_e(x, gate), "sum") * self.scale + x[: block.num_dst] / block.num_dst
            outputs[depth] = x = F.elu(x)
        return outputs[max(outputs)]


@pytest.mark.every(2)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_one_graph_of_ops(make):
    gm = Case(make(), fanouts=(3, 2)).trace()
    assert not foreign_nodes(gm)
    ops = {node.target for node in gm.graph.nodes if namespace(node)}
    assert {target.namespace for target in ops} == {"aten", "joestar"}
    assert torch.ops.joestar.compact.default in ops
    assert {node.op for node in gm.graph.nodes} <= {"placeholder", "call_function", "output"}


def test_user_written_sampler_and_model():
    graph = small_graph()
    case = check(Gated(), graph=graph, sampler=FrontierSampler(graph), batches=(SEEDS, SEEDS[:2], (5,)))
    assert case.program.captured.labels == ["slice", "sample", "compact", "slice", "compact"]


def test_roles_of_the_inputs():
    case = Case(jnn.GraphSAGE(NUM_FEATURES, WIDTH, 2, NUM_CLASSES), fanouts=(3, 2))
    gm = case.trace()
    captured = case.program.captured
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    by_name = dict(zip(names, captured.roles, strict=True))
    assert by_name["seeds"] == inputs.SEEDS
    assert by_name["key"] == inputs.KEY
    assert [by_name[f"size_{i}"] for i in range(6)] == [inputs.size_input(i) for i in range(6)]
    indptr, features = by_name["graph_indptr"], by_name["features"]
    assert indptr.tensor is case.graph.indptr and (indptr.kind, indptr.name) == (inputs.Kind.STRUCTURE, "graph.indptr")
    assert features.tensor is case.graph.ndata["x"] and (features.kind, features.name) == (
        inputs.Kind.FEATURE, "graph.ndata['x']",
    )  # fmt: skip
    assert by_name["targets"].kind is inputs.Kind.LABEL
    assert all(role.held == (role.tensor is not None) for role in captured.roles)
    parameters = {id(role.tensor) for role in captured.roles if role.kind is inputs.Kind.PARAMETER}
    assert {id(parameter) for parameter in case.model.parameters()} <= parameters


def test_sizes_are_symbolic():
    """Every set has a symbol of its own; the sets nest: seeds, sources of hop 0, sources of hop 1."""
    case = Case(jnn.GraphSAGE(NUM_FEATURES, WIDTH, 2, NUM_CLASSES), fanouts=(3, 2), disable=("dce", "dce-after"))
    gm = case.trace()
    table = size_table(gm, case.program.captured.roles)
    assert len(table.bounds) == 6  # slice, sample and compact of two hops
    (inner,) = (size for size, parent in table.parents.items() if parent == table.seeds)
    (outer,) = (size for size, parent in table.parents.items() if parent == inner)
    assert table.begins(table.seeds, outer)
    assert table.begins(inner, outer)
    assert not table.begins(outer, inner)
    assert set(table.ids) == {table.seeds, inner, outer}
    features = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.index_select.default)
    assert expression(features.meta["val"].shape[0]) == outer


class Unread(nn.Module):
    """A model of the last block alone, whose rows it looks up itself; of the first one it reads what ``f`` reads."""

    def __init__(self, f):
        super().__init__()
        self.table, self.f = nn.Parameter(torch.ones(NUM_NODES, NUM_CLASSES)), f

    def forward(self, blocks, x):
        first, last = blocks
        weight = self.f(first, x)
        return last.pull(fn.copy_u(self.table[last.srcs].tanh()), "sum") * (1 if weight is None else weight)


UNREAD = {
    "dead rows": lambda b, x: (x[: b.num_dst].relu(), None)[1],
    "dead rows of edges": lambda b, x: (b.apply_edges(fn.u_dot_v(x, x[: b.num_dst])), None)[1],
    "sizes": lambda b, x: b.num_src / b.num_dst + b.num_edges,
    "rows of that size": lambda b, x: torch.ones(b.num_src, 1, dtype=x.dtype)[: b.num_dst].sum() / 10,
}


@pytest.mark.parametrize("f", UNREAD.values(), ids=UNREAD.keys())
def test_sets_that_nobody_reads(f):
    """Guards of dead code hold because of dead sets, and a size that is read is one although its set is not."""
    check(Unread(f), fanouts=(3, 2))


def test_one_capture_serves_batches_of_any_size():
    case = Case(MODELS["gin"](), fanouts=(3, 2))
    gm = case.trace()
    for step, batch in enumerate((SEEDS, (1,), tuple(range(40)))):
        seeds = case.seeds(batch)
        assert_close(case.exact(seeds, step).loss, case.eager(seeds, step).loss)
    assert case.program.captured.gm is gm


def test_source_lines_are_kept():
    case = Case(Rows(lambda m, b, h: torch.asinh(h)))
    (node,) = (n for n in case.trace().graph.nodes if n.target is torch.ops.aten.asinh.default)
    assert "test_capture.py" in node.meta["stack_trace"]


def test_int64_ids():
    graph = small_graph()
    graph.indices = graph.indices.long()
    check(MODELS["gin"](), fanouts=(3, 2), graph=graph)


def test_squeeze_is_not_tied_to_the_batch():
    """``squeeze()`` removes the column, never the only row of a batch."""
    model = Rows(lambda m, b, h: h * h.mean(1, keepdim=True).squeeze(1)[:, None])
    graph = small_graph(isolated=3)
    check(model, ((47,), SEEDS), graph=graph)


def test_prediction_is_captured_in_evaluation_mode():
    model = Rows(
        lambda m, b, h: F.relu(m.norm(F.dropout(h, 0.5, m.training)), inplace=True), norm=nn.BatchNorm1d(WIDTH)
    )
    case = Case(model, kind="predict")
    (logits,), _ = case.program.exact(case.seeds(), case.key(0))
    assert not logits.requires_grad
    block = case.sampler.sample(case.graph.keyed(0, 0, 0), case.seeds())
    assert_close(logits, model.eval()(block, case.graph.ndata["x"][block[0].srcs]))
