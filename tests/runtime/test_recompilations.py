"""Bounds that batches outgrow: how often programs are compiled again, and what no longer fits."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

import joestar
from joestar.errors import JoestarWarning
from tests.runtime.common import CLASSES, make_step, planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def staircase(nodes=3000):
    """Node v has about v / 30 in-neighbours: batches in the order of ids grow without end."""
    random = torch.Generator().manual_seed(0)
    degree = torch.arange(nodes) // 30
    dst = torch.repeat_interleave(torch.arange(nodes), degree)
    src = torch.randint(0, nodes, (int(degree.sum()),), generator=random)
    data = {"x": torch.randn(nodes, 3, dtype=torch.float64, generator=random),
            "y": torch.randint(0, CLASSES, (nodes,), generator=random)}  # fmt: skip
    return joestar.Graph.from_edge_index(torch.stack([src, dst]), nodes, data)


def steep(nodes=600):
    """Node v has about 1.012 ** v in-neighbours: every batch in the order of ids is a tenth larger than the last."""
    degree = (1.012 ** torch.arange(nodes)).long()
    dst = torch.repeat_interleave(torch.arange(nodes), degree)
    src = torch.arange(len(dst)) % nodes
    x = torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return joestar.Graph.from_edge_index(torch.stack([src, dst]), nodes, {"x": x, "y": torch.arange(nodes) % CLASSES})


class OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(3, CLASSES).double()

    def forward(self, blocks, x):
        return self.conv(blocks[0], x)


@pytest.mark.parametrize("way", ["predict", "epoch", "steps", "batches", "steep"])
def test_no_order_of_ids_recompiles_more_than_five_times(way):
    graph = steep() if way == "steep" else staircase()
    idx = torch.arange(graph.num_nodes)
    model = OneLayer()
    sampler = joestar.NeighborSampler(graph, [-1])
    options = {"backend": "eager", "warm_up": 2, "patience": 1}
    step = joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.0), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoestarWarning)
        if way == "predict":
            step.predict(idx, 16)
        elif way == "epoch":
            list(step.epoch(idx, 16, shuffle=False))
        elif way in ("steps", "steep"):
            for seeds in idx.split(8 if way == "steep" else 32):
                step(seeds)
        else:  # larger and larger batches, as one calls them
            for size in range(1, 300, 7):
                step(idx[:size])
    assert step.counters.recompiles <= 5
    assert way != "steep" or step.counters.fallbacks >= step.counters.recompiles > 1


CALLS = ("epoch", "steps", "predict", "evaluate")


def compiled_again(in_degree: torch.Tensor, calls: list[tuple[str, int, bool]]) -> joestar.Step:
    """A step that was used in these ways (what, batch size, ids in descending order) on a graph of these degrees."""
    nodes = len(in_degree)
    dst = torch.repeat_interleave(torch.arange(nodes), in_degree)
    x = torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = {"x": x, "y": torch.arange(nodes) % CLASSES}
    graph = joestar.Graph.from_edge_index(torch.stack([torch.arange(len(dst)) * 7 % nodes, dst]), nodes, data)
    model, idx = OneLayer(), torch.arange(nodes)
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [-1]), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.0),
        backend="eager", warm_up=1, patience=1, slack=0.0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoestarWarning)
        for what, batch, descending in calls:
            order = idx.flip(0) if descending else idx
            if what == "epoch":
                list(step.epoch(order, batch, shuffle=False))
            elif what == "steps":
                for seeds in order.split(max(batch, nodes // 20)):
                    step(seeds)
            else:
                getattr(step, what)(order, batch)
    return step


@settings(max_examples=12, deadline=None)
@given(
    degrees=st.lists(st.integers(1, 6), min_size=4, max_size=90),
    steepness=st.sampled_from([1.0, 1.01, 1.02]),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(1, 32), st.booleans()), min_size=2, max_size=4),
)
@example([1] * 90, 1.02, [("predict", 4, False), ("epoch", 4, False)])
def test_no_use_recompiles_more_than_five_times(degrees, steepness, calls):
    """All programs of a step together, whatever the degrees, their order, the batches and what they are for."""
    in_degree = torch.tensor(degrees).repeat(4)
    in_degree = (in_degree * steepness ** torch.arange(len(in_degree))).long()
    assert compiled_again(in_degree, calls).counters.recompiles <= 5


def test_programs_share_what_may_be_compiled_again():
    step = compiled_again((1.02 ** torch.arange(350)).long(), [("predict", 4, False), ("epoch", 4, False)])
    each = [executor.widened for executor in step._executors.values()]
    assert sum(each) == step.counters.recompiles == 5 and step.counters.fallbacks > 5
    assert any("programs were compiled again 5 times" in note for note in step.report().counters.notes)


def test_a_run_that_goes_on_has_what_is_left():
    """Also of programs that it has not used yet."""
    step = compiled_again((1.02 ** torch.arange(350)).long(), [("predict", 4, False)])
    assert step.counters.recompiles == 5
    under_way = step.epoch(torch.arange(350), 4, shuffle=False)
    next(under_way)
    again = compiled_again((1.02 ** torch.arange(350)).long(), [])
    again.load_state_dict(step.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JoestarWarning)
        assert [loss.item() for loss in again.epoch(torch.arange(350), 4, shuffle=False)] == [
            loss.item() for loss in under_way
        ]
        again.predict(torch.arange(350), 4)
    assert [executor.widened for executor in again._executors.values()] == [0, 5]
    assert again._executor("train").program.bounds == step._executor("train").program.bounds


def test_bounds_come_from_all_over_the_epoch():
    """In the order of ids the first batches are the smallest: bounds from them alone would be far too small."""
    graph = staircase()
    model = OneLayer()
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [-1]), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1),
        backend="eager",
    )  # fmt: skip
    list(step.epoch(torch.arange(3000), 50, shuffle=False))
    assert step.counters.recompiles == 0 and step.counters.fallbacks <= 6


def test_what_no_longer_fits_runs_exactly_and_says_so():
    graph = planted_graph(dtype=torch.float64)
    step = make_step(graph=graph, model_options={"dropout": 0.0})
    exact = make_step("exact", graph=graph, model_options={"dropout": 0.0})
    step._executor("train").widened = 99
    for seeds in (torch.arange(10), torch.arange(40)):
        if seeds.numel() == 10:
            assert step(seeds).item() == pytest.approx(exact(seeds).item(), rel=1e-10)
        else:
            with pytest.warns(JoestarWarning, match="compiled again 99 times .* run exactly"):
                ours = step(seeds).item()
            assert ours == pytest.approx(exact(seeds).item(), rel=1e-10)
    assert step.counters.recompiles == 0 and step.counters.exact_steps == 1
