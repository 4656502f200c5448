"""Scatters and lookups by the ends of edges become segment ops: where, what stays the same, and every reason not to."""

import functools

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same

from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, count, only, reasons

PATTERN = "segments"
ON, OFF = only(PATTERN), only()


def ends(block):
    dst = JOESTAR.edge_dst(block.indptr, block.num_edges, block.indices)
    return block.indices.long(), dst.long()


def scattered(block, message, how="sum", **start):
    """As ``torch_geometric.utils.scatter`` writes it."""
    index = ends(block)[1].view(-1, 1).expand_as(message)
    zeros = message.new_zeros((block.num_dst, message.shape[1]))
    if how == "sum":
        return zeros.scatter_add(0, index, message)
    return zeros.scatter_reduce(0, index, message, how, include_self=start.get("include_self", False))


def sums(m, blocks, x):
    """Sum, mean by counts, weighted sum and extremum of a hop, and ``index_add`` of the other."""
    block = blocks[0]
    src, dst = ends(block)
    rows = x.index_select(-2, src)
    count = x.new_zeros(block.num_dst).scatter_add(0, dst, x.new_ones(block.num_edges)).clamp(min=1)
    weight = x.sum(1).sigmoid()[src]
    total = scattered(block, rows)
    x = total + total / count.view(-1, 1).expand_as(total) + scattered(block, weight.view(-1, 1) * rows)
    x = x + scattered(block, rows, "amax") - scattered(block, rows, "amin") * 0.5
    src, dst = ends(blocks[1])
    return x.new_zeros((blocks[1].num_dst, NUM_FEATURES)).index_add(0, dst, x[src])


def softmax(m, blocks, x):
    """Attention as PyG writes it, and the same hop again by a mean of differences of both ends."""
    src, dst = ends(blocks[0])
    score = x[:, :2]
    score = torch.nn.functional.leaky_relu(score.index_select(0, src) + score[: blocks[0].num_dst].index_select(0, dst))
    top = scattered(blocks[0], score.detach(), "amax")
    power = (score - top.index_select(0, dst)).exp()
    alpha = power / (scattered(blocks[0], power) + 1e-16).index_select(0, dst)
    x = scattered(blocks[0], alpha[:, :1] * x.index_select(0, src))
    src, dst = ends(blocks[1])
    return scattered(blocks[1], x.index_select(0, src) - x[: blocks[1].num_dst].index_select(0, dst), "mean")


@functools.cache
def known(name: str):
    """The model with the pass."""
    return captured(Model({"sums": sums, "softmax": softmax}[name]), disable=ON)


@pytest.mark.parametrize("name", ["sums", "softmax"])
def test_same_numbers(name):
    on, off = known(name), again(known(name), OFF)
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(off.padded(off.seeds(batch), step), expected, 1e-12)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_before_and_after():
    after = known("sums")
    before = again(after, OFF)
    for target, old, new in ((ATEN.scatter_add.default, 3, 0), (ATEN.scatter_reduce.two, 2, 0),
                             (ATEN.index_add.default, 1, 0), (JOESTAR.spmm.default, 0, 6)):  # fmt: skip
        assert (count(before.trace(), target), count(after.trace(), target)) == (old, new), target
    spmm = after.trace().graph.find_nodes(op="call_function", target=JOESTAR.spmm.default)
    assert sorted(node.args[4] for node in spmm) == ["max", "mean", "min", "sum", "sum", "sum"]
    assert [node.args[3] is not None for node in spmm].count(True) == 1
    gm = known("softmax").trace()
    assert count(gm, JOESTAR.edge_softmax.default) == 1 and count(gm, ATEN.exp.default) == 0
    sddmm = gm.graph.find_nodes(op="call_function", target=JOESTAR.sddmm.default)
    assert sorted(node.args[4] for node in sddmm) == ["add", "copy_lhs", "sub"]


def refused_forms(m, blocks, x):
    """One of each: against the edges, onto something, from what is there, a product, whole numbers."""
    block = blocks[0]
    src, dst = ends(block)
    rows = x[: block.num_dst].index_select(0, dst)
    back = x.new_zeros(x.shape).index_add(0, src, rows)
    onto = x[: block.num_dst].index_add(0, dst, rows)
    most = scattered(block, rows, "amax", include_self=True)
    product = scattered(block, rows.sigmoid(), "prod")
    whole = torch.zeros(block.num_dst, dtype=torch.int64).index_add(0, dst, src * 0 + 1)
    flags = rows.new_zeros(block.num_dst, rows.shape[1]).index_add(0, (dst > 0).long(), rows)
    narrowed = rows.new_zeros(block.num_dst, rows.shape[1]).index_add(0, dst.bool().long(), rows)
    x = back[: block.num_dst] + onto + most + product + whole.to(x.dtype).view(-1, 1) + flags + narrowed
    return blocks[1].pull(lambda edges: edges.src["h"], "mean", src={"h": x})


def test_must_not_fire():
    on = captured(Model(refused_forms), disable=ON)
    found = reasons(on, PATTERN)
    for reason in (
        "the index is not the destination of every edge",
        "it adds to what is there",
        "the reduction is amax, or starts from what is there",
        "the reduction is prod, or starts from what is there",
        "the values are no floating-point numbers",
    ):
        assert reason in found, (reason, found)
    off = again(on, OFF)
    for batch in (SEEDS, (5, 5, 47)):
        expected = off.exact(off.seeds(batch), 0)
        same(on.padded(on.seeds(batch), 0), expected, 1e-12)
        same(on.exact(on.seeds(batch), 0), expected, 1e-12)


def by_columns(m, blocks, x):
    """Sums of as many columns as there are destinations, divided by degrees along the columns: no mean."""
    block = blocks[0]
    src, dst = ends(block)
    degrees = x.new_zeros(block.num_dst).scatter_add(0, dst, x.new_ones(block.num_edges)).clamp(min=1)
    total = scattered(block, x[:, :1].index_select(0, src).expand(-1, block.num_dst).contiguous())
    wide = (total / degrees + total / degrees.view(1, -1)).sum(1, keepdim=True)
    src, dst = ends(blocks[1])
    return scattered(blocks[1], (x[: block.num_dst] * wide).index_select(0, src))


def test_sums_divided_along_their_columns_are_no_mean():
    on = captured(Model(by_columns), disable=ON)
    spmm = on.trace().graph.find_nodes(op="call_function", target=JOESTAR.spmm.default)
    assert len(spmm) >= 2 and "mean" not in {node.args[4] for node in spmm}
    same(on.exact(on.seeds(SEEDS), 0), on.eager(on.seeds(SEEDS), 0), 1e-12)


SIZES = {
    "a count of nodes": lambda block: block.num_dst,
    "its root": lambda block: block.num_dst**-0.5,
    "a count of edges": lambda block: block.num_edges,
    "a ratio": lambda block: block.num_edges / block.num_dst,
}


@pytest.mark.parametrize("name", SIZES)
def test_rows_of_edges_times_a_size(name):
    """A factor that is no tensor, on either side: in a message, in what PyG scatters, and in front of a mean."""

    def f(m, blocks, x):
        size, block = SIZES[name], blocks[0]
        rows = block.apply_edges(fn.u_mul_v(x, x[: block.num_dst])).tanh()
        h = block.pull(fn.copy_e(rows * size(block)), "sum") * 1e-3 + x[: block.num_dst]
        h = h + block.pull(fn.copy_e(size(block) * rows), "mean") * 1e-3
        src, dst = ends(blocks[1])
        message = (h.index_select(0, src) * size(blocks[1])) * 1e-3
        total = h.new_zeros((blocks[1].num_dst, h.shape[1])).index_add(0, dst, message)
        return total + scattered(blocks[1], size(blocks[1]) * h.index_select(0, src), "amax")

    on = captured(Model(f), disable=ON)
    for batch in (SEEDS, (5, 5, 47)):
        expected = on.eager(on.seeds(batch), 0)
        same(on.exact(on.seeds(batch), 0), expected, 1e-12)
        same(on.padded(on.seeds(batch), 0), expected, 1e-12)


def test_a_sum_divided_by_the_root_of_a_count_of_nodes():
    """A number, not a tensor: no mean of ours, and no error."""

    def f(m, blocks, x):
        return blocks[0].pull(fn.copy_u(x), "sum")[: blocks[1].num_dst] / blocks[1].num_dst ** 0.5 + (
            blocks[1].pull(fn.copy_u(x[: blocks[1].num_src]), "sum") / blocks[1].num_dst ** 0.5
        )

    on, off = (captured(Model(f), disable=disable) for disable in (ON, OFF))
    same(on.padded(on.seeds(SEEDS), 0), off.exact(off.seeds(SEEDS), 0), 1e-12)
