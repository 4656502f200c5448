"""Every pass: the graph of its docstring before and after, and the cases in which it must not fire."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import joestar
from joestar.errors import ConfigError, VerificationError
from joestar.fusion import PASSES, Pass, PassContext, run_passes
from joestar.fusion import cse as cse_pass
from joestar.fusion import dce as dce_pass
from joestar.fusion import extract_select as extract_select_pass
from joestar.profile.sizes import step_key
from joestar.runtime.program import Options, Program

JOESTAR, ATEN = torch.ops.joestar, torch.ops.aten
NAMES = [p.name for p in PASSES]


def _graph(learnable=False) -> joestar.Graph:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 200, (2, 2000), generator=random)
    x = torch.randn(200, 6, generator=random, dtype=torch.float64).requires_grad_(learnable)
    return joestar.Graph.from_edge_index(edges, 200, {"x": x, "y": torch.arange(200) % 3})


class Model(torch.nn.Module):
    """One layer per block, given as a function ``first(self, block, x)`` for the first."""

    def __init__(self, first):
        super().__init__()
        self.first = first
        self.a, self.b = torch.nn.Linear(6, 5).double(), torch.nn.Linear(6, 5).double()
        self.last = torch.nn.Linear(5, 3).double()

    def forward(self, blocks, x):
        h = self.first(self, blocks[0], x)
        return self.last(blocks[1].pull(joestar.fn.copy_u(F.relu(h)), "mean"))


def _program(first, disable=(), graph=None, sampler=None) -> Program:
    graph = _graph() if graph is None else graph
    torch.manual_seed(0)
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=5) if sampler is None else sampler
    program = Program("train", Model(first), sampler, F.cross_entropy, Options("eager", tuple(disable)))
    program.trace(torch.arange(10, dtype=torch.int32), step_key(5, 0, 0, "cpu"))
    return program


def _targets(program: Program) -> list:
    return [node.target for node in program.captured.gm.graph.nodes]


def _reasons(program: Program, pattern="sample-gather-aggregate") -> list[str]:
    return [place.detail for place in program.places if place.pattern == pattern and not place.fired]


def mean_layer(self, block, x):
    return self.a(block.pull(joestar.fn.copy_u(x), "mean")) + self.b(x[: block.num_dst])


def max_and_mean(self, block, x):
    return self.a(block.pull(joestar.fn.copy_u(x), "max")) + self.b(block.pull(joestar.fn.copy_u(x), "mean"))


def update_first(self, block, x):
    return block.pull(joestar.fn.copy_u(self.a(x)), "mean")


def weighted(self, block, x):
    weight = block.apply_edges(joestar.fn.u_dot_v(x, x[: block.num_dst]))
    return self.a(block.pull(joestar.fn.u_mul_e(x, weight), "sum"))


def looped(self, block, x):
    return self.a(block.add_self_loops().pull(joestar.fn.copy_u(x), "sum"))


def reads_sources(self, block, x):
    degrees = block.graph_degrees("src").double()
    return self.a(block.pull(joestar.fn.copy_u(x), "sum")) * degrees[: block.num_dst, None]


def test_extract_select_fuses_slice_and_sample():
    before = _program(mean_layer, disable=NAMES)
    after = _program(mean_layer, disable=["sample-gather-aggregate"])
    assert (
        _targets(before).count(JOESTAR.slice_cols.default)
        == 2
        == _targets(before).count(JOESTAR.rowwise_sample.default)
    )
    assert JOESTAR.slice_cols.default not in _targets(after) and JOESTAR.rowwise_sample.default not in _targets(after)
    assert _targets(after).count(JOESTAR.sample_cols.default) == 2
    assert [r.rewrites for r in after.passes if r.name == "extract-select"] == [2]


@pytest.mark.parametrize(
    ("other_ids", "shared", "reason"),
    [
        (False, True, "the slice is read by another operation as well"),
        (True, False, "rows are hashed under other ids than the sliced destinations"),
    ],
)
def test_extract_select_must_not_fire(other_ids, shared, reason):
    def build(graph, x):
        call = graph.call_function
        sliced = call(JOESTAR.slice_cols.default, (x, x, x, x, -1))
        indptr, indices = (call(operator.getitem, (sliced, i)) for i in range(2))
        ids = call(ATEN.neg.default, (x,)) if other_ids else x
        sample = call(JOESTAR.rowwise_sample.default, (indptr, indices, ids, 3, False, x, 0, -1))
        picked = call(operator.getitem, (sample, 1))
        return call(ATEN.add.Tensor, (picked, indices)) if shared else picked

    gm, context = _hand_built(build), PassContext([])
    assert extract_select_pass.run(gm, context) == 0
    assert [(place.fired, place.detail) for place in context.places] == [(False, reason)]


def test_whole_neighbourhoods_need_no_sample():
    program = _program(mean_layer, sampler=joestar.NeighborSampler(_graph(), [-1, -1]))
    assert JOESTAR.rowwise_sample.default not in _targets(program)
    assert _reasons(program) == ["the block does not come straight from a sample of columns"]


@pytest.mark.parametrize(("first", "fused"), [(mean_layer, 1), (max_and_mean, 2)])
def test_sample_gather_aggregate_fires(first, fused):
    before = _program(first, disable=["sample-gather-aggregate"])
    after = _program(first)
    targets = _targets(after)
    assert targets.count(JOESTAR.sample_aggregate.default) == fused
    assert targets.count(JOESTAR.compact.default) == 1 == _targets(before).count(JOESTAR.compact.default) - 1
    gathers = [
        n
        for n in after.captured.gm.graph.nodes
        if n.target is ATEN.index_select.default and n.args[0].name == "features"
    ]
    assert len(gathers) == (1 if first is mean_layer else 0)  # the destinations' own rows
    assert ATEN.slice.Tensor not in targets and _reasons(after) == []


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (update_first, "the gathered rows are also read by aten.linear before the aggregation"),
        (weighted, "the gathered rows are also read by joestar.sddmm before the aggregation"),
        (looped, "the aggregation runs over another structure"),
        (reads_sources, "the sources of the block are also read by"),
    ],
)
def test_sample_gather_aggregate_must_not_fire(first, reason):
    program = _program(first)
    assert JOESTAR.sample_aggregate.default not in _targets(program)
    (refusal,) = _reasons(program)
    assert refusal.startswith(reason)


def test_learnable_features_are_refused():
    program = _program(mean_layer, graph=_graph(learnable=True))
    assert _reasons(program) == ["the features need gradients"]


@pytest.mark.parametrize("first", [mean_layer, max_and_mean, update_first, weighted, looped, reads_sources])
def test_passes_change_neither_loss_nor_gradients(first):
    results = []
    for disable in ([], NAMES):
        program = _program(first, disable)
        (loss,), _ = program.exact(torch.arange(10, dtype=torch.int32), step_key(5, 0, 3, "cpu"))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in program.model.parameters() if p.grad is not None)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-12, atol=1e-12)


def _hand_built(build) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(3)
    graph.output((build(graph, x),))
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = torch.ones(3)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_dce_removes_what_nobody_reads_and_keeps_writes():
    def build(graph, x):
        graph.call_function(ATEN.relu.default, (x,))
        graph.call_function(ATEN.add_.Tensor, (x, 1))
        return graph.call_function(ATEN.neg.default, (x,))

    gm = _hand_built(build)
    assert dce_pass.run(gm, None) == 1
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [ATEN.add_.Tensor, ATEN.neg.default]


def test_cse_merges_pure_calls():
    def build(graph, x):
        a, b = (graph.call_function(ATEN.exp.default, (x,)) for _ in range(2))
        return graph.call_function(ATEN.mul.Tensor, (a, b))

    gm = _hand_built(build)
    assert cse_pass.run(gm, None) == 1
    (product,) = gm.graph.find_nodes(op="call_function", target=ATEN.mul.Tensor)
    assert product.args[0] is product.args[1]


def test_cse_tells_constants_of_different_types_apart_and_respects_writes():
    def build(graph, x):
        one = graph.call_function(ATEN.add.Tensor, (x, 1))
        true = graph.call_function(ATEN.add.Tensor, (x, True))
        graph.call_function(ATEN.mul_.Tensor, (x, 2))
        again = graph.call_function(ATEN.add.Tensor, (x, 1))
        return graph.call_function(ATEN.addcmul.default, (one, true, again))

    assert cse_pass.run(_hand_built(build), None) == 0


def test_cse_keeps_draws_of_different_sites_apart():
    def twice(self, block, x):
        h = block.pull(joestar.fn.copy_u(x), "mean")
        return self.a(F.dropout(h, 0.5, self.training)) + self.a(F.dropout(h, 0.5, self.training))

    assert _targets(_program(twice)).count(JOESTAR.keyed_dropout.default) == 2


def test_a_pass_without_its_requirements_is_left_out():
    program = _program(mean_layer, disable=["cse"])
    skipped = [record.name for record in program.passes if record.skipped]
    assert skipped == ["cse", "extract-select", "sample-gather-aggregate"]


def test_unknown_pass():
    with pytest.raises(ConfigError, match="there is no pass 'inline' to disable; passes are: dce, cse, extract-select"):
        _program(mean_layer, disable=["inline"])


def _foreign(gm, context):
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        node = gm.graph.call_function(torch.relu, (output.args[0][0],))
        node.meta = dict(output.args[0][0].meta)
    output.args = ((node,),)
    return 1


def _wrong_shape(gm, context):
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((gm.graph.find_nodes(op="placeholder")[0],),)
    return 1


def _no_shape(gm, context):
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        gm.graph.call_function(ATEN.neg.default, (output.args[0][0],))
    return 1


def _crash(gm, context):
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_foreign, "pass broken left a node that is no op"),
        (_wrong_shape, "pass broken changed the graph's outputs"),
        (_no_shape, "pass broken left node neg.* without shape information"),
        (_crash, "pass broken failed: 'lost'"),
    ],
)
def test_a_broken_pass_is_caught_where_it_happens(broken, message):
    program = _program(mean_layer, disable=NAMES)
    with pytest.raises(VerificationError, match=message):
        run_passes(program.captured.gm, program.captured.roles, passes=(Pass("broken", broken),))


def test_context_notes_places_with_their_source_line():
    program = _program(mean_layer)
    fired = [place for place in program.places if place.fired]
    assert {place.pattern for place in fired} == {"extract-select", "sample-gather-aggregate"}
    assert any("test_passes.py" in place.source and "pull" in place.source for place in fired)
    assert isinstance(PassContext([]).places, list) and operator.getitem in _targets(program)
