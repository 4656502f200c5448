"""A padded program in two halves: together they are the whole, and the front reads nothing that a step changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.lowering.inputs import Kind
from joestar.lowering.split import Halves, Whole, split
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program
from joestar.runtime.seeds import filled
from joestar.sampling import NeighborSampler
from joestar.store import FeatureStore
from lowering.harness import NUM_FEATURES, SEEDS, Rows, seeded, small_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")
ROOM = 12


def compiled(model, sampler=None, graph=None, **options) -> Program:
    graph = graph or small_graph()
    program = Program("train", seeded(model), sampler or NeighborSampler(graph, [3]), F.cross_entropy,
                      Options("eager", **options))  # fmt: skip
    program.trace(torch.tensor(SEEDS, dtype=torch.int32), step_key(0, 0, 0, "cpu"))
    program.compile([97 + 16 * place for place in range(len(program.captured.labels))], ROOM)
    return program


def carried_out(program: Program, ahead: bool) -> list[torch.Tensor]:
    """Loss, gradients, buffers, sizes and ok of two steps; fronts of both before the first back, if ``ahead``."""
    left, keys = [], [step_key(0, 0, number, "cpu") for number in range(2)]
    batches = [filled(torch.tensor(part, dtype=torch.int32), ROOM) for part in (SEEDS, SEEDS[:3])]
    counts, flag = [torch.tensor(len(SEEDS)), torch.tensor(3)], torch.zeros((), dtype=torch.bool)
    made = [program.ahead(*given) for given in zip(batches, counts, keys, strict=True)] if ahead else [None, None]
    for seeds, count, key, front in zip(batches, counts, keys, made, strict=True):
        (loss,), sizes, ok = program.step(seeds, count, key, flag, front)
        loss.backward()
        parameters = list(program.model.parameters())
        left += [loss.detach(), sizes, ok, *(p.grad.clone() for p in parameters), *program.model.buffers()]
        left = [value.clone() for value in left]
        with torch.no_grad():  # what a step changes, in between
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=-0.1)
        program.model.zero_grad()
    return left


def quiet(model, block, h):
    with torch.no_grad():
        scale = h.mean(0).abs() + 1
    return F.dropout(model.norm(h / scale), 0.4)


class Weighing(Rows):
    """Weights edges by a column of theirs."""

    def __init__(self):
        super().__init__(None)

    def forward(self, blocks, x):
        (block,) = blocks
        return self.last(block.pull(joestar.fn.u_mul_e(self.first(x), block.edata["w"]), "sum"))


MODELS = {
    "no_grad, dropout, BatchNorm": lambda: Rows(quiet, norm=nn.BatchNorm1d(8)),
    "edge data": Weighing,
    "attention": lambda: joestar.nn.GAT(NUM_FEATURES, 8, 1, 4, heads=2),
    "normalised": lambda: joestar.nn.GCN(NUM_FEATURES, 8, 1, 4, dropout=0.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_halves_are_the_whole_bit_for_bit(name):
    graph = small_graph()
    graph.edata["w"] = torch.linspace(0.1, 1, graph.num_edges, dtype=torch.float64)
    model, others = MODELS[name]().double(), {}
    for prefetch in (False, True):
        program = compiled(copy.deepcopy(model), graph=graph, prefetch=prefetch)
        assert isinstance(program.halves, Halves) == prefetch
        others[prefetch] = carried_out(program, ahead=prefetch)
    for ours, theirs in zip(others[True], others[False], strict=True):
        assert torch.equal(ours, theirs)


def test_the_front_reads_what_no_step_changes_and_the_back_no_table():
    program = compiled(Rows(quiet, norm=nn.BatchNorm1d(8)).double(), prefetch=True)
    halves, roles = program.halves, program.padded.roles
    front = {roles[place].kind for place in halves.front_inputs}
    back = {roles[place].kind for place in halves.back_inputs}
    assert front == {Kind.STRUCTURE, Kind.FEATURE, Kind.LABEL, Kind.SEEDS, Kind.SEED_COUNT, Kind.KEY}
    assert {Kind.PARAMETER, Kind.BUFFER, Kind.FLAG} <= back and not {Kind.STRUCTURE, Kind.FEATURE, Kind.LABEL} & back
    (place,) = (place for place in program.places if place.pattern == "prefetch")
    assert place.fired and "sample_cols" in place.detail and "index_select" in place.detail


def test_rows_from_elsewhere_are_read_by_a_part_of_the_front():
    model, found = Rows(quiet, norm=nn.BatchNorm1d(8)), {}
    for where in ("here", "far, whole", "far"):
        graph = small_graph()
        graph.ndata["x"] = graph.ndata["x"].float()
        if where != "here":
            graph.ndata["x"] = FeatureStore(graph.ndata["x"], "cpu", hot=torch.arange(0, graph.num_nodes, 3))
        program = compiled(copy.deepcopy(model), graph=graph, prefetch=where != "far, whole")
        found[where] = carried_out(program, ahead=where != "far, whole")
        if where == "here":
            assert program.halves.far is None
    halves, roles = program.halves, program.padded.roles
    near, far = ({roles[place].kind for place in places} for places in (halves.front_inputs, halves.far.inputs))
    assert Kind.FEATURE in far and Kind.FEATURE not in near and {Kind.STRUCTURE, Kind.LABEL, Kind.SEEDS} <= near
    assert not {Kind.STRUCTURE, Kind.PARAMETER, Kind.BUFFER, Kind.FLAG} & far
    assert "gather_rows" in str(halves.far.run.graph) and "gather_rows" not in str(halves.front.graph)
    (place,) = (place for place in program.places if place.pattern == "prefetch")
    assert "far rows are read on a stream of their own" in place.detail
    for values in zip(*found.values(), strict=True):
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])


class Weighted:
    """Draws by weights that the model has."""

    def __init__(self, graph, weight):
        self.graph, self.weight = graph, weight

    def sample(self, graph, seeds):
        return [graph[:, seeds].individual_sample(3, edge_probs=self.weight)]


def test_a_sampler_that_follows_the_model_is_not_cut_and_says_so():
    model = Rows(lambda m, b, h: h).double()
    model.register_buffer("seen", torch.ones(170, dtype=torch.float32))
    program = compiled(model, Weighted(small_graph(), model.seen), prefetch=True)
    assert program.halves is None
    (place,) = (place for place in program.places if place.pattern == "prefetch")
    assert not place.fired and "depends on model.seen, which a step changes" in place.detail


def test_memory_counts_not_the_name_under_which_it_is_read():
    """A table of the graph that is part of a buffer, or that the model writes."""
    buffer = torch.ones(170, dtype=torch.float32)
    program = compiled(Rows(lambda m, b, h: h).double(), Weighted(small_graph(), buffer), prefetch=True)
    assert program.halves is not None
    found = split(program.padded.gm, program.padded.roles, frozenset({buffer.untyped_storage().data_ptr()}))
    assert isinstance(found, Whole)
