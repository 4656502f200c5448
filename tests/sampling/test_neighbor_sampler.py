"""``NeighborSampler``: a pure function of its key, and what its blocks hold."""

import itertools

import pytest
import torch

from joestar import _native
from joestar.errors import JoestarError, SamplerError
from joestar.graph_api import Graph, SamplingContext
from joestar.sampling import LayerDependentSampler, NeighborSampler

NUM_NODES = 400


def _graph(num_nodes: int = NUM_NODES, num_edges: int = 6000, seed: int = 0) -> Graph:
    """Skewed in-degrees, duplicate edges, self-loops; the last tenth of the nodes has no in-edges."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    dst = (torch.rand(num_edges, generator=generator) ** 2 * (num_nodes * 0.9)).long()
    return Graph.from_edge_index(torch.stack([src, dst]), num_nodes)


GRAPH = _graph()


def _seeds(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def _same(left, right) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(left, right, strict=True)
        for name in ("indptr", "indices", "srcs", "dsts")
    )


def _in_neighbours(node: int) -> list:
    start, end = GRAPH.indptr[node : node + 2].tolist()
    return GRAPH.indices[start:end].tolist()


def _rows(block) -> list:
    """Global ids of the sampled sources of every destination."""
    picked = block.srcs[block.indices.long()].tolist()
    return [picked[a:b] for a, b in itertools.pairwise(block.indptr.tolist())]


# --- purity ---------------------------------------------------------------------------------------------------------


def test_same_for_any_number_of_threads():
    graph = _graph(20_000, 400_000, seed=1)
    seeds = torch.randperm(20_000, generator=torch.Generator().manual_seed(2))[:6000].int()
    for fanouts, replace in (([10, 5], False), ([8, -1], True), ([70], False)):
        sampler = NeighborSampler(graph, fanouts, replace=replace, seed=3)
        alone = sampler.sample(graph, seeds)
        assert alone[0].num_edges > 60_000  # enough for every kernel to split its work
        for threads in (2, 16):
            _native.set_num_threads(threads)
            assert _same(sampler.sample(graph, seeds), alone)
        _native.set_num_threads(1)


def test_a_sample_depends_on_its_key_and_nothing_else():
    sampler = NeighborSampler(GRAPH, [4, 3])
    seeds = torch.arange(0, 360, 7, dtype=torch.int32)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 0, 2**32), (-1, 0, 0)]
    samples = [sampler.sample(GRAPH.keyed(*key), seeds) for key in keys]
    torch.manual_seed(99)  # no global generator is involved
    for key, blocks in zip(keys, samples, strict=True):
        assert _same(sampler.sample(GRAPH.keyed(*key), seeds), blocks)
    for (first, one), (second, two) in itertools.combinations(zip(keys, samples, strict=True), 2):
        assert not torch.equal(one[-1].srcs, two[-1].srcs), (first, second)


def test_the_seed_of_the_sampler_is_used_without_a_key():
    seeds = torch.arange(100, dtype=torch.int32)
    samplers = [NeighborSampler(GRAPH, [4], seed=seed) for seed in (0, 0, 5)]
    same, again, other = (sampler.sample(GRAPH, seeds) for sampler in samplers)
    assert _same(same, again)
    assert not _same(same, other)
    assert _same(other, samplers[0].sample(GRAPH.keyed(5), seeds))
    assert _same(same, samplers[2].sample(GRAPH.keyed(0), seeds))  # the key of the step wins


def test_hops_draw_independently():
    """The same nodes at the same fanout, once as hop 0 and once as hop 1."""
    seeds = torch.arange(300, dtype=torch.int32)
    inner, outer = NeighborSampler(GRAPH, [3, 3], seed=1).sample(GRAPH, seeds)
    rows = zip(_rows(inner)[:300], _rows(outer), strict=True)
    large = [(a, b) for node, (a, b) in enumerate(rows) if len(_in_neighbours(node)) > 10]
    assert len(large) > 50
    assert sum(a == b for a, b in large) < len(large) // 5


def test_a_row_does_not_depend_on_the_batch():
    sampler = NeighborSampler(GRAPH, [4], seed=2)
    (whole,) = sampler.sample(GRAPH, torch.arange(NUM_NODES, dtype=torch.int32))
    expected = _rows(whole)
    order = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(1))[:77]
    (part,) = sampler.sample(GRAPH, order.int())
    assert _rows(part) == [expected[node] for node in order.tolist()]


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", [[3], [2, 4], [5, 1, 3], [-1, 2], [100]])
def test_blocks_chain_and_hold_true_neighbours(fanouts, replace):
    seeds = _seeds(8, 399, 0, 120, 359)
    blocks = NeighborSampler(GRAPH, fanouts, replace=replace, seed=4).sample(GRAPH, seeds)
    assert len(blocks) == len(fanouts)
    assert torch.equal(blocks[-1].dsts, seeds)
    for block, after in itertools.pairwise(blocks):
        assert torch.equal(block.dsts, after.srcs)
    for block, fanout in zip(blocks, fanouts[::-1], strict=True):
        assert torch.equal(block.srcs[: block.num_dst], block.dsts), "destinations come first"
        fresh = block.srcs[block.num_dst :]
        assert fresh.unique().numel() == fresh.numel()
        assert not torch.isin(fresh, block.dsts).any()
        assert block.indices.min() >= 0
        assert block.indices.max() < block.num_src
        for node, row in zip(block.dsts.tolist(), _rows(block), strict=True):
            _check_row(row, _in_neighbours(node), fanout, replace)


def _check_row(row: list, neighbours: list, fanout: int, replace: bool) -> None:
    if fanout == -1 or (not replace and len(neighbours) <= fanout):
        assert row == neighbours
    elif replace:
        assert len(row) == (fanout if neighbours else 0)
        assert set(row) <= set(neighbours)
    else:
        assert len(row) == fanout
        for node in set(row):  # an edge is picked once; parallel edges are edges of their own
            assert row.count(node) <= neighbours.count(node)


def test_new_sources_come_in_order_of_first_appearance():
    (block,) = NeighborSampler(GRAPH, [6], seed=4).sample(GRAPH, _seeds(8, 30, 120))
    order = block.dsts.tolist()
    for node in itertools.chain(*_rows(block)):
        if node not in order:
            order.append(node)
    assert block.srcs.tolist() == order


def test_duplicate_seeds_get_a_row_each():
    (block,) = NeighborSampler(GRAPH, [3], seed=4).sample(GRAPH, _seeds(7, 9, 7, 7))
    assert block.num_dst == 4
    assert block.srcs[:4].tolist() == [7, 9, 7, 7]
    rows = _rows(block)
    assert rows[0] == rows[2] == rows[3]
    assert block.indices.max() < block.num_src
    assert not torch.isin(block.indices, torch.tensor([2, 3])).any(), "neighbours map to the first occurrence"


def test_isolated_seeds_and_no_seeds():
    isolated = NeighborSampler(GRAPH, [3, 3]).sample(GRAPH, _seeds(399, 398))
    for block in isolated:
        assert (block.num_src, block.num_dst, block.num_edges) == (2, 2, 0)
        assert block.indptr.tolist() == [0, 0, 0]
    empty = NeighborSampler(GRAPH, [3]).sample(GRAPH, _seeds())
    assert (empty[0].num_src, empty[0].num_dst, empty[0].num_edges) == (0, 0, 0)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_id_dtype_of_graph_and_seeds(ids):
    graph = Graph.from_csc(GRAPH.indptr, GRAPH.indices.to(ids))
    expected = NeighborSampler(GRAPH, [4, 2], seed=1).sample(GRAPH, _seeds(1, 2, 3))
    for seeds in (_seeds(1, 2, 3), _seeds(1, 2, 3).long()):
        blocks = NeighborSampler(graph, [4, 2], seed=1).sample(graph, seeds)
        for block, reference in zip(blocks, expected, strict=True):
            assert block.srcs.dtype == block.indices.dtype == ids
            assert torch.equal(block.srcs.int(), reference.srcs)
            assert torch.equal(block.indices.int(), reference.indices)


@pytest.mark.parametrize("slack", [0, 11])
def test_sizes_given_to_the_context_are_bounds(slack):
    """Sampling under bounds (slice, then rows) finds the same picks as the exact one, followed by padding."""
    sampler, seeds = NeighborSampler(GRAPH, [4, -1, 3]), _seeds(5, 80, 80, 399)
    key = torch.tensor([9, 1, 2])
    recording = SamplingContext(key)
    exact = sampler.sample(GRAPH.with_context(recording), seeds)
    bounded = SamplingContext(key, [size + slack for size in recording.recorded])
    padded = sampler.sample(GRAPH.with_context(bounded), seeds)
    assert (
        bounded.labels
        == recording.labels
        == ["slice", "sample", "compact", "slice", "compact", "slice", "sample", "compact"]
    )
    if slack == 0:
        assert _same(padded, exact)
    first, bound = exact[-1], padded[-1]
    assert (bound.num_src, bound.num_edges) == (first.num_src + slack, first.num_edges + slack)
    assert torch.equal(bound.indptr, first.indptr)
    assert torch.equal(bound.indices[: first.num_edges], first.indices)
    assert (bound.indices[first.num_edges :] == 0).all()
    assert torch.equal(bound.srcs[: first.num_src], first.srcs)
    assert (bound.srcs[first.num_src :] == seeds[0]).all()


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fanouts", "message"),
    [
        ([], "fanouts is empty"),
        ([5, 0], r"fanouts\[1\] = 0: expected a positive integer below 2\*\*31, or -1"),
        ([2**70], r"fanouts\[0\] = 1180591620717411303424"),
        ([-2], r"fanouts\[0\] = -2"),
        ([3, 2.5], r"fanouts\[1\] = 2.5"),
        ([True], r"fanouts\[0\] = True"),
        ("15", r"fanouts\[0\] = '1'"),
        (5, "fanouts must be a list.*got 5"),
        ({5, 3}, "fanouts must be a list.*got {3, 5}"),
        ({"cites": 5}, "fanouts must be a list.*got {'cites': 5}"),
    ],
)
def test_impossible_fanouts(fanouts, message):
    with pytest.raises(SamplerError, match=message):
        NeighborSampler(GRAPH, fanouts)


@pytest.mark.parametrize("replace", ["no", None, 1])
def test_replace_is_yes_or_no(replace):
    with pytest.raises(SamplerError, match=f"replace must be True or False; got {replace!r}"):
        NeighborSampler(GRAPH, [3], replace=replace)


@pytest.mark.parametrize("seed", [None, "7", 7.5, True, 2**63, -(2**63) - 1])
def test_impossible_seeds(seed):
    wanted = r"seed must be a whole number in \[-2\*\*63, 2\*\*63\); got "
    for make in (lambda: NeighborSampler(GRAPH, [5], seed=seed), lambda: LayerDependentSampler(GRAPH, [5], seed=seed)):
        with pytest.raises(SamplerError, match=wanted):
            make()
    with pytest.raises(JoestarError, match=wanted):
        GRAPH.keyed(seed)


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), torch.tensor(7)])
def test_possible_seeds(seed):
    sampler = NeighborSampler(GRAPH, [2], seed=seed)
    assert sampler.seed == int(seed)
    assert _same(sampler.sample(GRAPH, _seeds(0, 3)), sampler.sample(GRAPH.keyed(seed), _seeds(0, 3)))


def test_not_a_graph():
    with pytest.raises(SamplerError, match=r"needs a joestar.Graph; got tuple"):
        NeighborSampler((GRAPH.indptr, GRAPH.indices), [5])


@pytest.mark.parametrize("k", [0, -2, 1.5, True, None])
def test_impossible_k(k):
    with pytest.raises(SamplerError, match="individual_sample: k must be a positive integer, or -1"):
        GRAPH[:, _seeds(0)].individual_sample(k)


def test_seeds_that_are_no_nodes():
    sampler = NeighborSampler(GRAPH, [2])
    for seeds, message in (
        (_seeds(3, 400), r"dsts\[1\] = 400 is not a node"),
        (_seeds(-1), r"dsts\[0\] = -1 is not a node"),
        (torch.tensor([1.0]), "int32 or int64 tensor"),
        (torch.tensor([[1]]), "int32 or int64 tensor"),
        (["a", "b"], "must hold numbers; got list of dtype <U1"),
    ):
        with pytest.raises(JoestarError, match=message):
            sampler.sample(GRAPH, seeds)


def test_repr():
    assert repr(NeighborSampler(GRAPH, (5, -1), True, 3)) == "NeighborSampler(fanouts=[5, -1], replace=True, seed=3)"
