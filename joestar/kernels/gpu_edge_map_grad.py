"""Gradients of edge programs on the GPU, in at most two passes over the edges, without atomic additions to rows.

The first pass goes over destinations: gradients of their rows, of edges' rows and scalars, and, as sums of every
program's share, of vectors and narrow weights. The second goes over sources, each of which adds up its own edges, from
a list whose order changes between runs; under ``torch.use_deterministic_algorithms(True)`` in edge order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.determinism import is_deterministic
from joestar.kernels.edge_program import EdgeGradient, EdgeProgram, check_wanted, gradient, grouped
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_edge_map import TAIL, checked, work_of
from joestar.kernels.gpu_edge_steps import (
    described,
    edge_leaves,
    edges_ahead,
    head_grads,
    held_leaves,
    leaf_values,
    prepared,
    run_steps,
)
from joestar.kernels.gpu_launch import cdiv, fill_tail, op, require
from joestar.kernels.gpu_links import link_edges
from joestar.kernels.gpu_spmm import row_edges, transposed
from joestar.kernels.gpu_structure import edge_dst
from joestar.kernels.gpu_tiles import (
    accumulator,
    check_values,
    column_block,
    tile_columns,
    tile_configs,
    tile_rows,
)

_AHEAD = 2
"""Edges of a destination that are read before the first is used."""


@triton.jit
def _added(sums, values, loaded, valid, SUMMED: tl.constexpr, TIMES: tl.constexpr, RESULTS: tl.constexpr):
    """``sums`` plus the gradients of the leaves ``SUMMED``, times their feature ``TIMES`` unless that is -1."""
    more = ()
    for s in tl.static_range(len(SUMMED)):
        value = tl.where(valid, values[RESULTS[SUMMED[s]]], 0)
        if TIMES[s] >= 0:
            value = value * loaded[SUMMED[s]][TIMES[s]].to(value.dtype)
        more = more + (sums[s] + value,)  # noqa: RUF005
    return more


@triton.jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([ROWS, BLOCK], ACC),)  # noqa: RUF005
    return sums


@triton.jit
def _store_rows(outs, sums, at, mask, SUMMED: tl.constexpr):
    """Each of ``sums`` to the tensor of its leaf."""
    for s in tl.static_range(len(SUMMED)):
        out = outs[SUMMED[s]]
        tl.store(out + at, sums[s].to(out.dtype.element_ty), mask)


@triton.jit
def _store_edges(
    outs, values, e, valid, column, inside, part, num_edges,
    EDGES: tl.constexpr, SCALARS: tl.constexpr, RESULTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of edges' rows, and of their scalars: the sum over the columns of part ``part``."""
    for s in tl.static_range(len(EDGES)):
        out = outs[EDGES[s]]
        value = values[RESULTS[EDGES[s]]]
        tl.store(out + e * WIDTH + column, value.to(out.dtype.element_ty), valid & inside)
    for s in tl.static_range(len(SCALARS)):
        value = tl.sum(tl.where(inside, values[RESULTS[SCALARS[s]]], 0), 1, keep_dims=True)
        tl.store(outs[SCALARS[s]] + part * num_edges.to(tl.int64) + e, value, valid)


@triton.jit(do_not_specialize=["n", "num_edges"])
def _edge_map_grad_dst(
    indptr, indices, leaves, grad, outs, partial, n, num_edges,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, NAMES: tl.constexpr, READ: tl.constexpr,
    NUMBERS: tl.constexpr, RESULTS: tl.constexpr, FROM_SRC: tl.constexpr, DSTS: tl.constexpr, EDGES: tl.constexpr,
    SCALARS: tl.constexpr, SUMMED: tl.constexpr, TIMES: tl.constexpr, NOTHING: tl.constexpr, MEAN: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the leaves ``DSTS``, ``EDGES`` and ``SCALARS``, and the program's share of those of ``SUMMED``.

    ``partial`` ``[programs, len(SUMMED), WIDTH]``. ``NOTHING``: as many -1 as there are ``DSTS``.
    """
    part = tl.program_id(1)
    column = tile_columns(part, BLOCK)
    inside = column < WIDTH
    totals = _zeros(len(SUMMED), ROWS, BLOCK, ACC)
    tile = tl.program_id(0)
    while tile * ROWS < n:
        i = tile * ROWS + tl.arange(0, ROWS)[:, None]
        start, end = row_edges(indptr, None, None, i, n)
        held = held_leaves(leaves, i, column, start < end, inside, KINDS, PLACES, COLUMNS, "dst", WIDTH, ACC)
        own = tl.zeros([ROWS, BLOCK], ACC)
        if HEADS == 0:
            own = tl.load(grad + i.to(tl.int64) * WIDTH + column, (start < end) & inside, 0).to(ACC)
        if MEAN:
            own = own / tl.maximum(end - start, 1).to(ACC)
        longest = tl.max(end - start)
        sums = _zeros(len(DSTS), ROWS, BLOCK, ACC)
        done = tl.zeros((), tl.int64)
        while done < longest:
            loaded, grads = (), ()
            for j in tl.static_range(AHEAD):
                e = start + done + j
                valid = e < end
                source = e
                if FROM_SRC:
                    source = tl.load(indices + e, valid, 0).to(tl.int64)
                leaf = edge_leaves(leaves, e, source, valid, column, inside, KINDS, PLACES, COLUMNS, "dst", WIDTH)
                loaded = loaded + (leaf,)  # noqa: RUF005
                edge_grad = own
                if HEADS > 0:
                    edge_grad = head_grads(grad, e, valid, column, inside, HEADS, HEAD_WIDTH, ACC)
                grads = grads + (edge_grad,)  # noqa: RUF005
            for j in tl.static_range(AHEAD):
                e = start + done + j
                valid = e < end
                values = leaf_values(held, loaded[j], KINDS, COLUMNS, "dst", ACC) + (grads[j],)  # noqa: RUF005
                values = run_steps(values, NAMES, READ, NUMBERS, ACC)
                sums = _added(sums, values, loaded[j], valid, DSTS, NOTHING, RESULTS)
                totals = _added(totals, values, loaded[j], valid, SUMMED, TIMES, RESULTS)
                _store_edges(outs, values, e, valid, column, inside, part, num_edges, EDGES, SCALARS, RESULTS, WIDTH)
            done += AHEAD
        _store_rows(outs, sums, i.to(tl.int64) * WIDTH + column, (i < n) & inside, DSTS)
        tile += tl.num_programs(0)
    for s in tl.static_range(len(SUMMED)):
        at = partial + (tl.program_id(0).to(tl.int64) * len(SUMMED) + s) * WIDTH + column
        tl.store(at, tl.sum(totals[s], 0, keep_dims=True), inside)
    last, size = tl.load(indptr + n), num_edges.to(tl.int64)
    for s in tl.static_range(len(EDGES)):
        fill_tail(outs[EDGES[s]], last * WIDTH, size * WIDTH, 0, TAIL)
    for s in tl.static_range(len(SCALARS)):
        fill_tail(outs[SCALARS[s]] + part * size, last, size, 0, TAIL)


@triton.jit
def _left(at, last, order):
    """Negative behind the last edge of a source."""
    if order is None:
        return at
    else:
        return last - at - 1


@triton.jit(do_not_specialize=["num_src"])
def _edge_map_grad_src(
    first, links, order, indptr, leaves, grad, outs, num_src,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, NAMES: tl.constexpr, READ: tl.constexpr,
    NUMBERS: tl.constexpr, RESULTS: tl.constexpr, SRCS: tl.constexpr, NOTHING: tl.constexpr, MEAN: tl.constexpr,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the leaves ``SRCS``: every source adds up what comes back along its edges.

    These are a list, see ``link_edges``; or, given ``order``, the edges ``order[first[s] : first[s + 1]]``, whose
    destinations are ``links``.
    """
    s = tile_rows(ROWS)
    known = s < num_src
    column = tile_columns(tl.program_id(1), BLOCK)
    inside = column < WIDTH
    held = held_leaves(leaves, s, column, known, inside, KINDS, PLACES, COLUMNS, "src", WIDTH, ACC)
    sums = _zeros(len(SRCS), ROWS, BLOCK, ACC)
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
        if HEADS > 0:
            edge_grad = head_grads(grad, e, valid, column, inside, HEADS, HEAD_WIDTH, ACC)
        else:
            edge_grad = tl.load(grad + row * WIDTH + column, valid & inside, 0).to(ACC)
        if MEAN:
            degree = tl.load(indptr + row + 1, valid, 1) - tl.load(indptr + row, valid, 0)
            edge_grad = edge_grad / degree.to(ACC)
        loaded = edge_leaves(leaves, e, row, valid, column, inside, KINDS, PLACES, COLUMNS, "src", WIDTH)
        values = leaf_values(held, loaded, KINDS, COLUMNS, "src", ACC) + (edge_grad,)  # noqa: RUF005
        values = run_steps(values, NAMES, READ, NUMBERS, ACC)
        sums = _added(sums, values, loaded, valid, SRCS, NOTHING, RESULTS)
    _store_rows(outs, sums, s.to(tl.int64) * WIDTH + column, known & inside, SRCS)


def _constants(program: EdgeProgram, leaves: list[Tensor], line: EdgeGradient, wanted: list[bool]) -> dict:
    """What both passes know of the gradient's steps; leaves that they do not read are not loaded."""
    kinds = [kind if leaf in line.read else "none" for leaf, kind in enumerate(program.leaves)]
    for leaf, group in enumerate(grouped(program, wanted)):
        if kinds[leaf] == "none" and len(group) > 1 and group[1]:
            kinds[leaf] = "features"
    return {**described(program, leaves, line.steps, tuple(kinds)), "RESULTS": line.results}


def _grid_configs(width: int, size: int, sums: int) -> list[tune.Config]:
    """Rows, warps and programs of a pass that keeps ``sums`` tiles of float32, or half as many others; default first.

    Programs of one warp wait for no other and exchange nothing; many sums take more threads to a row.
    """
    per_warp = min(config["ROWS"] for config in tile_configs(width, size))
    tried = [(1, 1, 2112), (2, 4, 1056), (1, 2, 2112), (1, 4, 1056)]
    if sums > 8:
        tried.reverse()
    return [{"ROWS": per_warp * rows, "num_warps": warps, "GRID": grid} for rows, warps, grid in tried]


def _over_destinations(
    indptr: Tensor, indices: Tensor, leaves: tuple[Tensor, ...], program: EdgeProgram, line: EdgeGradient, grad: Tensor,
    wanted: list[bool], out: list[Tensor], settings: dict, name: str,
) -> None:  # fmt: skip
    """Fills the gradients of all leaves but sources' rows."""
    n, edges, width, like = indptr.numel() - 1, indices.numel(), settings["WIDTH"], leaves[0]
    wide, parts = torch.promote_types(like.dtype, torch.float32), cdiv(width, settings["BLOCK"])
    kinds = [kind if result >= 0 else "" for kind, result in zip(program.leaves, line.results, strict=True)]
    of = {kind: tuple(leaf for leaf, own in enumerate(kinds) if own == kind) for kind in ("dst", "edge", "scalar")}
    slots = []  # (leaf, feature, tensor of a vector or a weight)
    outs, places = [grad] * len(kinds), settings["PLACES"]
    for leaf, kind in enumerate(kinds):
        first = places[leaf]
        if kind == "scalar":
            outs[leaf] = torch.empty((parts, edges), dtype=wide, device=like.device)
        elif kind in ("dst", "edge"):
            outs[leaf] = out[first]
        elif kind == "vector":
            slots.append((leaf, -1, first))
        elif kind in ("narrow", "narrow_plain"):
            slots += [(leaf, k, first + 1) for k in range(settings["COLUMNS"][leaf] if wanted[first + 1] else 0)]
            slots += [(leaf, -1, first + 2)] * (kind == "narrow" and wanted[first + 2])
    if not (slots or any(of.values())):
        return
    settings = {
        **settings, "FROM_SRC": "src" in settings["KINDS"], "DSTS": of["dst"], "EDGES": of["edge"],
        "SCALARS": of["scalar"], "NOTHING": (-1,) * len(of["dst"]), "TAIL": TAIL,
        "AHEAD": edges_ahead(leaves, program, _AHEAD),
        "SUMMED": tuple(leaf for leaf, _, _ in slots), "TIMES": tuple(k for _, k, _ in slots),
    }  # fmt: skip
    found = []

    def launch(config: tune.Config) -> None:
        config, tiles = dict(config), cdiv(n, config["ROWS"])
        grid = max(1, min(config.pop("GRID", tiles), tiles))
        partial = torch.empty((grid, len(slots), width), dtype=wide, device=like.device)
        _edge_map_grad_dst[(grid, parts)](
            indptr, indices, leaves, grad, tuple(outs), partial, n, edges, **settings, **config
        )
        found[:] = [added_up(partial) if slots else partial]

    size = like.element_size()
    configs = tile_configs(width, size)
    if slots:
        configs = _grid_configs(width, size, len(slots) * (1 if size == 4 else 2))
    shape = (like.dtype, width, name, *wanted, tune.size_class(n), tune.size_class(edges))
    launch(
        tune.choose("edge_map_grad_dst", shape, configs, launch, work_of(program, n, edges, width, size), grad.device)
    )
    for leaf in of["scalar"]:
        out[places[leaf]] = outs[leaf].sum(0).to(like.dtype).view(leaves[places[leaf]].shape)
    for slot, (_, k, place) in enumerate(slots):
        if k < 0:
            out[place].copy_(found[0][slot])
        elif k == 0:
            out[place].copy_(found[0][slot : slot + out[place].shape[1]].t())


def _over_sources(
    indptr: Tensor, indices: Tensor, leaves: tuple[Tensor, ...], program: EdgeProgram, line: EdgeGradient, grad: Tensor,
    out: list[Tensor], settings: dict, name: str,
) -> None:  # fmt: skip
    """Fills the gradients of sources' rows."""
    asked = zip(program.leaves, line.results, strict=True)
    srcs = tuple(leaf for leaf, (kind, result) in enumerate(asked) if kind == "src" and result >= 0)
    if not srcs:
        return
    outs = [out[place] if leaf in srcs else grad for leaf, place in enumerate(settings["PLACES"])]
    num_src, width = outs[srcs[0]].shape
    order = None
    if is_deterministic():
        rows = edge_dst(indptr, indices.numel(), indices)
        first, links, order = transposed(indptr, indices, rows, num_src)
    else:
        first, links = link_edges(indptr, indices, num_src)
    settings = {**settings, "SRCS": srcs, "NOTHING": (-1,) * len(srcs)}

    def launch(config: tune.Config) -> None:
        grid = (max(1, cdiv(num_src, config["ROWS"])), cdiv(width, settings["BLOCK"]))
        _edge_map_grad_src[grid](first, links, order, indptr, leaves, grad, tuple(outs), num_src, **settings, **config)

    size, edges = grad.element_size(), indices.numel()
    shape = (grad.dtype, width, name, tune.size_class(num_src), tune.size_class(edges))
    work = 2 * (num_src + edges) * width * size
    launch(tune.choose("edge_map_grad_src", shape, tile_configs(width, size), launch, work, grad.device))


@op
def edge_map_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, reduce: str, grad: Tensor, wanted: list[bool]
) -> list[Tensor]:
    """Gradients of ``edge_map`` for the tensors of ``leaves`` that are ``wanted``, else empty ``[0]``.

    The sums of sources' rows run in an order that changes between runs, but under
    ``torch.use_deterministic_algorithms(True)``.
    """
    parsed, width, heads = checked(indptr, indices, leaves, program, reduce)
    check_values(grad=grad)
    line = gradient(parsed, check_wanted(parsed, leaves, wanted))
    shape = [indices.numel(), heads] if heads else [indptr.numel() - 1, width]
    require(list(grad.shape) == shape, f"grad {shape}", list(grad.shape))
    out = [torch.empty_like(leaf) if w else leaf.new_empty(0) for leaf, w in zip(leaves, wanted, strict=True)]
    constants = _constants(parsed, leaves, line, wanted)
    for leaf, group in enumerate(grouped(parsed, out)):
        if line.results[leaf] < 0 or not (width and indices.numel()):
            for tensor in group:
                tensor.zero_()
    if width and indices.numel():
        settings = {
            **constants, "MEAN": reduce == "mean", "HEADS": heads, "HEAD_WIDTH": width // max(1, heads),
            "WIDTH": width, "ACC": accumulator(leaves[0]), "BLOCK": column_block(width),
        }  # fmt: skip
        name = f"{program}|{reduce}".replace(" ", "_")
        leaves = prepared(parsed, leaves)
        _over_destinations(indptr, indices, leaves, parsed, line, grad, wanted, out, settings, name)
        _over_sources(indptr, indices, leaves, parsed, line, grad, out, settings, name)
    return out
