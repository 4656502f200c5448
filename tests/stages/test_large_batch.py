"""The large-batch first stage: the union of a sampler's hops, against sets and loops."""

import itertools
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar import _native
from joestar.errors import SamplerError
from joestar.graph_api import Block, Graph
from joestar.graph_api.context import FIRST_STAGE_SITE
from joestar.kernels.cpu_stages import edge_ranks, in_huge_pages
from joestar.kernels.dropout import DROPOUT_SITE
from joestar.sampling import LayerDependentSampler, NeighborSampler
from joestar.stages import LargeBatch, check_macro_batch
from joestar.stages.macro import Picked
from joestar.stages.union import run_sampler, union
from stages.support import Layers, TwoKinds, Whole, blocks_of, fields, random_graph, reference

KEY = (7, 3, 2)
SEEDS = torch.tensor([5, 1, 40, 5, 2, 33])


def samplers(graph: Graph) -> dict:
    """Every kind of sampler by name."""
    weight = torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(4))
    return {
        "15,10,5": NeighborSampler(graph, [15, 10, 5]),
        "2,3": NeighborSampler(graph, [2, 3]),
        "replace": NeighborSampler(graph, [4, 3, 9], replace=True),
        "all": NeighborSampler(graph, [-1, -1]),
        "all first": NeighborSampler(graph, [-1, 2]),
        "all last": NeighborSampler(graph, [2, 2, -1]),
        "all between": NeighborSampler(graph, [2, -1, 3], replace=True),
        "many": NeighborSampler(graph, [3, 100]),
        "many in all": NeighborSampler(graph, [30, 30, 30]),
        "one hop": NeighborSampler(graph, [4]),
        "17 hops": NeighborSampler(graph, [1] * 17),
        "weighted": NeighborSampler(graph, [3, 2, 4], probs="w"),
        "weighted, replace": NeighborSampler(graph, [3, 2], replace=True, probs=graph.edata["w"]),
        "weighted, all": NeighborSampler(graph, [2, -1, 3], probs="w"),
        "layers": LayerDependentSampler(graph, [12, 20]),
        "layers, given": LayerDependentSampler(graph, [12, 20], node_probs=weight),
        "user's": TwoKinds(),
        "by hand": Whole(),
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", samplers(random_graph()))
def test_the_union_of_any_samplers_hops_is_that_of_sets(name, dtype):
    graph = random_graph(dtype=dtype)
    sampler = samplers(graph)[name]
    seeds = SEEDS.unique() if name == "by hand" else SEEDS
    macro = LargeBatch(6).sample(graph, sampler, seeds, KEY)
    assert fields(check_macro_batch(macro, graph)) == reference(graph, blocks_of(graph, sampler, seeds, KEY), seeds)
    assert macro.ids.dtype is dtype and macro.indices.dtype is macro.seeds.dtype is torch.int32
    assert macro.ids[macro.seeds.long()].tolist() == seeds.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", samplers(random_graph()))
@pytest.mark.parametrize("eids", [True, False])
def test_picked_edges_are_those_of_the_union(name, dtype, eids):
    """Row for row in the order of the graph, whatever the order of rows, which have no numbers but their ids."""
    graph = random_graph(dtype=dtype)
    sampler, stage = samplers(graph)[name], LargeBatch(6, eids=eids)
    picked, seeds = stage.pick(graph, sampler, SEEDS, KEY), SEEDS.to(dtype)
    assert (picked is None) == (not isinstance(sampler, NeighborSampler))
    if picked is None:
        return
    macro = stage.sample(graph, sampler, SEEDS, KEY)
    expected = Picked.of(macro)
    assert torch.equal(picked.seeds, seeds) and picked.sources.dtype is picked.rows.dtype is dtype
    assert (picked.num_edges, picked.num_rows) == (macro.num_edges, macro.num_rows)
    assert rows_of(picked) == rows_of(expected) and (picked.eids is None) == (not eids)
    assert set(seeds.tolist()) <= set(picked.rows.tolist())


def rows_of(picked: Picked) -> dict[int, tuple[list[int], list[int] | None]]:
    """Sources and positions of the edges of every row."""
    parts = itertools.pairwise(picked.indptr.tolist())
    assert picked.rows.unique().numel() == picked.num_rows and picked.indptr[-1] == picked.num_edges
    return {
        row: (picked.sources[a:b].tolist(), None if picked.eids is None else picked.eids[a:b].tolist())
        for row, (a, b) in zip(picked.rows.tolist(), parts, strict=True)
    }


def test_picked_edges_of_many_blocks_of_work():
    graph = random_graph(60_000)
    sampler, seeds = NeighborSampler(graph, [7, 5, 3]), torch.arange(0, 60_000, 7)
    expected = rows_of(Picked.of(LargeBatch(1).sample(graph, sampler, seeds, KEY)))
    threads, found = _native.num_threads(), []
    try:
        for number in (1, 3):
            _native.set_num_threads(number)
            found.append(LargeBatch(1).pick(graph, sampler, seeds, KEY))
    finally:
        _native.set_num_threads(threads)
    assert torch.equal(found[0].rows, found[1].rows) and torch.equal(found[0].sources, found[1].sources)
    assert rows_of(found[0]) == expected


@pytest.mark.parametrize("number", range(12))
def test_the_way_straight_to_the_union_gives_what_the_blocks_give(number):
    random = np.random.default_rng(number)
    graph = random_graph(int(random.integers(2, 400)), int(random.integers(1, 20)), number)
    fanouts = [int(k) for k in random.choice([-1, 1, 2, 5, 9, 20, 70], random.integers(1, 4))]
    weighted = {"probs": "w"} if number % 3 == 0 else {}
    sampler = NeighborSampler(graph, fanouts, replace=number % 4 == 1, **weighted)
    seeds = torch.from_numpy(random.integers(0, graph.num_nodes, random.integers(1, 90))).to(torch.int32)
    straight = LargeBatch(8).sample(graph, sampler, seeds, KEY)
    hops = union(graph, *run_sampler(graph, sampler, seeds, KEY), seeds, True, "")
    assert fields(straight) == fields(hops)


@pytest.mark.parametrize("sampler", [NeighborSampler, Layers])
def test_any_number_of_threads_gives_the_same(sampler):
    graph = random_graph(4000, 10)
    sampler = sampler(graph, [9, 6, 4])
    seeds = torch.arange(0, 4000, 3)
    threads, found = _native.num_threads(), []
    try:
        for number in (1, 2, 7):
            _native.set_num_threads(number)
            found.append(fields(LargeBatch(8).sample(graph, sampler, seeds, KEY)))
    finally:
        _native.set_num_threads(threads)
    assert len(found[0]["indices"]) > 20_000 and found[0] == found[1] == found[2]


def test_the_order_and_repetition_of_seeds_change_nothing_else():
    graph = random_graph()
    sampler = NeighborSampler(graph, [4, 3])
    one, other = (LargeBatch(6).sample(graph, sampler, seeds, KEY) for seeds in (SEEDS, SEEDS.unique()))
    assert fields(one) | {"seeds": None} == fields(other) | {"seeds": None}


def end_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes


def mapped_regions() -> list[tuple[int, int, int]]:
    """This process's memory: the first and the last address, and KiB in huge pages, of each region."""
    found = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^AnonHugePages: +(\d+)", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    return [(int(first, 16), int(end, 16), int(huge)) for first, end, huge in found]


def test_huge_pages_change_nothing(tmp_path):
    tensor = torch.arange(3_000_000)
    done = in_huge_pages(tensor)
    assert torch.equal(tensor, torch.arange(3_000_000))
    if done:  # it may lie in several of the system's regions, and the system may take some of the pages back at once
        assert sum(huge for first, end, huge in mapped_regions() if first < end_of(tensor) and tensor.data_ptr() < end)
    path = tmp_path / "file"
    tensor.numpy().tofile(path)
    mapped = torch.from_numpy(np.memmap(path, np.int64, "c"))
    assert not in_huge_pages(mapped) and not in_huge_pages(tensor[:1000]) and not in_huge_pages(tensor[::2])
    assert torch.equal(mapped, tensor)


def test_fanouts_of_minus_1_keep_whole_neighbourhoods():
    """So what a mini-batch draws in the macro-batch is what it draws in the graph: the same positions in every row."""
    graph = random_graph(200, 8)
    macro = LargeBatch(6).sample(graph, NeighborSampler(graph, [-1, -1]), SEEDS, KEY)
    for row, node in enumerate(macro.ids[: macro.num_rows].tolist()):
        here = slice(int(macro.indptr[row]), int(macro.indptr[row + 1]))
        there = slice(int(graph.indptr[node]), int(graph.indptr[node + 1]))
        assert macro.eids[here].tolist() == list(range(there.start, there.stop))
        assert torch.equal(macro.ids[macro.indices[here].long()], graph.indices[there])
    local = {node: position for position, node in enumerate(macro.ids.tolist())}
    for block in NeighborSampler(graph, [5, 3]).sample(graph.keyed(7, 3, 11), SEEDS[1:4].to(torch.int32)):
        nodes = block.dsts.repeat_interleave(block.indptr.diff()).tolist()
        for node, eid in zip(nodes, block.eids.tolist(), strict=True):
            place = int(macro.indptr[local[node]]) + eid - int(graph.indptr[node])
            assert macro.eids[place] == eid


def test_first_stages_draw_independently_of_steps():
    """Picks of a hub by macro-batch i and by step i have in common what independent picks have."""
    graph = random_graph()
    degree, k, trials = int(graph.indptr[2] - graph.indptr[1]), 15, 150
    sampler = NeighborSampler(graph, [k])
    common = 0
    for step in range(trials):
        macro = LargeBatch(1).sample(graph, sampler, torch.tensor([1]), (0, 0, step))
        block = sampler.sample(graph.keyed(0, 0, step), torch.tensor([1], dtype=torch.int32))[0]
        common += int(torch.isin(block.eids, macro.eids).sum())
    expected = trials * k * k / degree
    assert abs(common - expected) < 4 * expected**0.5
    assert FIRST_STAGE_SITE >= DROPOUT_SITE << 4


def test_a_memory_mapped_graph_is_read_in_place(tmp_path):
    graph = random_graph(300, 9)
    mapped = []
    for name, tensor in (("indptr", graph.indptr), ("indices", graph.indices)):
        np.save(tmp_path / f"{name}.npy", tensor.numpy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the array is read-only
            mapped.append(torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="r")))
    whole = Graph.from_csc(*mapped, validate=False)
    for sampler in (NeighborSampler(whole, [5, 4]), LayerDependentSampler(whole, [30, 50])):
        here, there = (LargeBatch(6, eids=True).sample(g, sampler, SEEDS, KEY) for g in (whole, graph))
        assert fields(here) == fields(there)


def test_eids_come_where_something_may_look_them_up():
    graph = random_graph()
    plain = Graph.from_csc(graph.indptr, graph.indices)
    assert LargeBatch(6).sample(graph, NeighborSampler(graph, [2]), SEEDS, KEY).eids is not None
    assert LargeBatch(6, eids=False).sample(graph, NeighborSampler(graph, [2]), SEEDS, KEY).eids is None
    assert LargeBatch(6).sample(plain, NeighborSampler(plain, [2]), SEEDS, KEY).eids is None
    weighted = NeighborSampler(plain, [2], probs=graph.edata["w"])
    macro = LargeBatch(6).sample(plain, weighted, SEEDS, KEY)
    assert macro.eids is not None
    tensors = macro.seeds, macro.ids, macro.indptr, macro.indices, macro.eids
    assert macro.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("sampler", [NeighborSampler, Layers])
def test_results_are_written_where_the_caller_wants_them(sampler):
    graph, given = random_graph(), []

    def empty(n, dtype):
        given.append(torch.full((n,), -7, dtype=dtype))
        return given[-1]

    sampler = sampler(graph, [4, 3])
    macro = LargeBatch(6, empty=empty).sample(graph, sampler, SEEDS, KEY)
    assert [id(tensor) for tensor in given] == [id(t) for t in (macro.ids, macro.indptr, macro.indices, macro.eids)]
    assert fields(macro) == fields(LargeBatch(6).sample(graph, sampler, SEEDS, KEY))
    with pytest.raises(SamplerError, match="contiguous memory"):
        LargeBatch(6, empty=lambda n, dtype: torch.empty(2 * n, dtype=dtype)[::2]).sample(graph, sampler, SEEDS, KEY)


def test_a_samplers_own_sample_is_run():
    graph = random_graph()

    class Twice(NeighborSampler):
        def sample(self, graph, seeds):
            return [graph[:, seeds].individual_sample(1)]

    changed = NeighborSampler(graph, [5, 5])
    changed.sample = Twice(graph, [5]).sample
    for sampler in (Twice(graph, [5, 5]), changed):
        macro = LargeBatch(6).sample(graph, sampler, SEEDS, KEY)
        assert fields(macro) == reference(graph, blocks_of(graph, sampler, SEEDS, KEY), SEEDS)


@pytest.mark.parametrize("probs", [None, "w"])
def test_pieces_of_a_macro_batch_that_does_not_fit_make_up_the_whole(probs):
    graph = random_graph(400, 6)
    sampler, seeds, stage = NeighborSampler(graph, [4, 3, 2], probs=probs), torch.arange(3, 400, 4), LargeBatch(100)
    whole = stage.sample(graph, sampler, seeds, KEY)
    room = whole.num_nodes // 2
    pieces = stage.sample_pieces(graph, sampler, seeds, KEY, lambda macro: macro.num_nodes <= room, batch=8)
    assert len(pieces) > 2 and all(piece.num_nodes <= room for piece in pieces)
    assert all(len(piece.seeds) % 8 == 0 for piece in pieces[:-1])
    assert torch.cat([piece.ids[piece.seeds.long()] for piece in pieces]).tolist() == seeds.tolist()
    assert torch.equal(torch.cat([piece.eids for piece in pieces]).unique(), whole.eids)
    (same,) = stage.sample_pieces(graph, sampler, seeds, KEY, lambda macro: True, batch=8)
    assert fields(same) == fields(whole)
    with pytest.raises(SamplerError, match="one mini-batch"):
        stage.sample_pieces(graph, sampler, seeds, KEY, lambda macro: False, batch=8)


class Walks:
    """A user's sampler: edges from the ends of two-step walks, which the graph has not."""

    def sample(self, graph, seeds):
        near = graph[:, seeds].individual_sample(5)
        far = graph[:, near.srcs].individual_sample(1).add_self_loops()
        steps = far.indptr.index_select(0, near.indices)
        return [Block(near.indptr, far.indices.index_select(0, steps), far.srcs, near.dsts, graph)]


class Looped:
    """A user's sampler that adds self-loops to one of its blocks."""

    def sample(self, graph, seeds):
        near = graph[:, seeds].individual_sample(3)
        return [graph[:, near.srcs].individual_sample(4).add_self_loops(), near]


@pytest.mark.parametrize("sampler", [Walks(), Looped()])
def test_what_sampling_calls_picked_stands_for_edges_that_the_graph_has_not(sampler):
    graph = random_graph()
    plain = NeighborSampler(graph, [5, 1] if isinstance(sampler, Walks) else [3, 4])
    macro = LargeBatch(6).sample(graph, sampler, SEEDS, KEY)
    assert fields(macro) == fields(LargeBatch(6).sample(graph, plain, SEEDS, KEY))
    here = Graph.from_csc(torch.nn.functional.pad(macro.indptr, (0, macro.num_nodes - macro.num_rows),
                          value=macro.num_edges), macro.indices)  # fmt: skip
    assert len(sampler.sample(here.keyed(1), macro.seeds)) in (1, 2)


class Wrong:
    """A sampler that returns what ``function(graph, seeds)`` makes."""

    def __init__(self, function):
        self.sample = function


def _shifted(graph, seeds):
    block = graph[:, seeds].individual_sample(3)
    return [Block(block.indptr, block.indices, block.srcs, block.dsts, graph, block.eids.roll(1))]


def _swapped(graph, seeds):
    block = graph[:, seeds].individual_sample(3)
    return [Block(block.indptr, block.indices, block.srcs.flip(0), block.dsts, graph, block.eids)]


def _torn(graph, seeds):
    first = graph[:, seeds].individual_sample(3)
    return [graph[:, first.srcs.flip(0)].individual_sample(2), first]


def _short(graph, seeds):
    block = graph[:, seeds].individual_sample(3)
    return [Block(block.indptr, block.indices, block.srcs, block.dsts, graph, block.eids[:-1])]


def _outside(graph, seeds):
    block = graph[:, seeds].individual_sample(3)
    srcs = torch.cat([block.srcs, torch.tensor([60], dtype=block.srcs.dtype)])
    return [Block(block.indptr, block.indices, srcs, block.dsts, graph, block.eids)]


def _falling(graph, seeds):
    block = graph[:, seeds].individual_sample(3)
    indptr = block.indptr.clone()
    indptr[1] = 10**9
    return [Block(indptr, block.indices, block.srcs, block.dsts, graph, block.eids)]


def _of_a_second_graph(graph, seeds):
    other = graph.keep_edges(torch.arange(graph.num_edges) % 2 == 0)
    return [other.with_context(graph.context)[:, seeds].compact()]


WRONG = {
    "a second graph": (_of_a_second_graph, r"the edges of both, told apart by its edata \(graph \+ other\)"),
    "edges from nowhere": (Whole(eids=False).sample, "no sampling call found its node"),
    "nodes that are none": (_outside, r"srcs\[\d+\] = 60 is not a node"),
    "eids of other edges": (_shifted, "not the positions of its edges"),
    "offsets that fall": (_falling, "non-decreasing"),
    "too few eids": (_short, "not the positions of its edges"),
    "sources in another order": (_swapped, "do not begin with its destinations"),
    "blocks that do not follow": (_torn, "are not the sources of block 1"),
    "blocks of other sizes": (lambda g, s: [g[:, s].compact(), g[:, s].compact()], "Blocks go from the input side"),
    "other seeds": (lambda g, s: [g[:, s.flip(0)].compact()], "do not begin with the seeds"),
    "nothing": (lambda g, s: [], "non-empty list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_blocks_that_cannot_be_right_are_refused(name):
    function, message = WRONG[name]
    with pytest.raises(SamplerError, match=message):
        LargeBatch(6).sample(random_graph(), Wrong(function), torch.tensor([5, 1, 40]), KEY)


@pytest.mark.parametrize(
    "seeds", [[], [60], [-1], [[1, 2]], torch.tensor([1.0]), torch.tensor([True, False]), torch.empty(0).int()]
)
def test_seeds_that_are_no_nodes_are_refused(seeds):
    graph = random_graph()
    with pytest.raises(SamplerError):
        LargeBatch(6).sample(graph, NeighborSampler(graph, [3]), seeds, KEY)


@pytest.mark.parametrize("number", [0, -1, True, 2.5, "10"])
def test_a_number_of_seeds_that_is_none_is_refused(number):
    with pytest.raises(SamplerError, match="num_seeds"):
        LargeBatch(number)


@settings(max_examples=60, deadline=None)
@given(degrees=st.lists(st.integers(0, 9) | st.just(300), min_size=1, max_size=40), seed=st.integers(0, 1000))
def test_ranks_are_positions_in_the_rows_of_the_whole_graph(degrees, seed):
    random = torch.Generator().manual_seed(seed)
    whole = torch.cumsum(torch.tensor([0, *degrees]), 0)
    rows = torch.nonzero(torch.rand(len(degrees), generator=random) < 0.6).flatten()
    kept = [torch.nonzero(torch.rand(degrees[row], generator=random) < 0.5).flatten() for row in rows.tolist()]
    indptr = torch.cumsum(torch.tensor([0, *map(len, kept)]), 0)
    wanted = torch.cat([torch.zeros(0, dtype=torch.int64), *kept])
    eids = wanted + whole[rows].repeat_interleave(indptr.diff())
    out = torch.full((len(eids),), -1, dtype=torch.int32)
    for ids in (torch.int32, torch.int64):
        assert torch.equal(edge_ranks(whole, rows.to(ids), indptr, eids, out).long(), wanted)
    with pytest.raises(ValueError, match="eids int64"):
        edge_ranks(whole, rows, indptr, eids.int(), out)
    with pytest.raises(ValueError, match="as many eids and ranks as edges"):
        edge_ranks(whole, rows, indptr, eids, torch.zeros(len(eids) + 1, dtype=torch.int32))
    if len(eids):
        with pytest.raises(IndexError, match="not a node of the graph"):
            edge_ranks(whole, rows + len(degrees), indptr, eids, out)
