"""The second pass of a segment program's gradient on the GPU: over sources, see ``gpu_segment_grad``."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.determinism import is_deterministic
from joestar.kernels.gpu_launch import cdiv
from joestar.kernels.gpu_links import link_edges
from joestar.kernels.gpu_segment_steps import (
    added,
    columns,
    edge_leaves,
    held_leaves,
    leaf_values,
    run_steps,
    store_tile,
    strides,
    tile,
    tiles_of,
    zeros,
)
from joestar.kernels.gpu_spmm import transposed
from joestar.kernels.gpu_structure import edge_dst
from joestar.kernels.segment_gradient import SegmentGradient
from joestar.kernels.segment_program import SIZES, SegmentProgram


@triton.jit
def _left(at, last, order):
    """Negative behind the last edge of a source."""
    if order is None:
        return at
    else:
        return last - at - 1


@triton.jit(do_not_specialize=["num_src"])
def _segment_grad_src(
    first, links, order, leaves, outs, num_src,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, NAMES: tl.constexpr,
    READ: tl.constexpr, INTO: tl.constexpr, NUMBERS: tl.constexpr, RESULTS: tl.constexpr, SRCS: tl.constexpr,
    OF_SRCS: tl.constexpr, NOTHING: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the leaves ``SRCS``: every source adds up what comes back along its edges.

    These are a list, see ``link_edges``; or, given ``order``, the edges ``order[first[s] : first[s + 1]]``, whose
    destinations are ``links``.
    """
    s = tile(ROWS)
    known = s < num_src
    head, column, inside = columns(HEADS, HEAD_WIDTH, WIDTH, TALL, BLOCK)
    held = held_leaves(
        leaves, s, head, column, known, inside, KINDS, PLACES, COLUMNS, STRIDES, "src", HEADS, HEAD_WIDTH, WIDTH,
        ACC,
    )  # fmt: skip
    sums = zeros(OF_SRCS, 0, ROWS, TALL, BLOCK, ACC)
    at = tl.load(first + s, known, -1)
    last = at
    if order is not None:
        last = tl.load(first + s + 1, known, -1)
    while tl.max(_left(at, last, order)) >= 0:
        valid = _left(at, last, order) >= 0
        link = tl.load(links + at, valid, -1)
        if order is None:
            e, row = at.to(tl.int64), link & 0xFFFFFFFF
            at = (link >> 32).to(tl.int32)
        else:
            e, row = tl.load(order + at, valid, 0), link.to(tl.int64)
            at += 1
        loaded = edge_leaves(
            leaves, e, row, valid, head, column, inside, KINDS, PLACES, COLUMNS, STRIDES, "src", HEADS, HEAD_WIDTH,
            WIDTH, BLOCK,
        )  # fmt: skip
        values = leaf_values(held, loaded, KINDS, COLUMNS, "src", ACC)
        values = run_steps(values, inside, NAMES, READ, NUMBERS, ACC)
        sums = added(sums, values, loaded, valid, SRCS, NOTHING, RESULTS)
    for k in tl.static_range(len(SRCS)):
        own = outs[SRCS[k]]
        store_tile(own, s.to(tl.int64), sums[k], known, head, column, inside, OF_SRCS[k], HEADS, INTO[SRCS[k]])


def over_sources(
    indptr: Tensor, indices: Tensor, tensors: tuple[Tensor, ...], program: SegmentProgram, line: SegmentGradient,
    out: list[Tensor], settings: dict, name: tuple,
) -> None:  # fmt: skip
    """Fills the gradients of sources' rows."""
    asked = enumerate(zip(program.leaves, line.results, strict=True))
    srcs = tuple(leaf for leaf, (kind, result) in asked if kind.startswith("src") and result >= 0)
    if not srcs:
        return
    places, order = settings["PLACES"], None
    outs = tuple(out[places[leaf]] if leaf in srcs else tensors[0] for leaf in range(len(program.leaves)))
    num_src, width, edges = outs[srcs[0]].shape[0], settings["WIDTH"], indices.numel()
    if is_deterministic():
        rows = edge_dst(indptr, edges, indices)
        first, links, order = transposed(indptr, indices, rows, num_src)
    else:
        first, links = link_edges(indptr, indices, num_src)
    of = tuple(SIZES[program.leaves[leaf]] for leaf in srcs)
    settings = {**settings, "SRCS": srcs, "OF_SRCS": of, "NOTHING": (-1,) * len(srcs), "INTO": strides(outs)}

    def launch(config: tune.Config) -> None:
        grid = (max(1, cdiv(num_src, config["ROWS"])), cdiv(settings["HEADS"], settings["TALL"]))
        _segment_grad_src[grid](first, links, order, tensors, outs, num_src, **settings, **config)

    size = name[0].itemsize
    shape = (*name, tune.size_class(num_src), tune.size_class(edges))
    configs = tiles_of(settings, size)
    launch(tune.choose("segment_grad_src", shape, configs, launch, 2 * (num_src + edges) * width * size, indptr.device))
