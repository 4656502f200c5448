"""Gradients of segment programs on the GPU, in at most two passes over the edges, without atomic additions to rows.

The gradient is a program as well: its leaves are those of the program, the gradients of the results, and what the
forward pass left (``segment_gradient.grad_rows``). The first pass goes over destinations: gradients of their rows, of
edges' rows and numbers, and, as sums of every program's share, of vectors and narrow weights. The second goes over
sources, each of which adds up its own edges, from a list whose order changes between runs; under
``torch.use_deterministic_algorithms(True)`` in edge order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import tune
from joestar.kernels.gpu_columns import added_up
from joestar.kernels.gpu_launch import cdiv, fill_tail, on_device
from joestar.kernels.gpu_segment import ahead, work_of
from joestar.kernels.gpu_segment_grad_src import over_sources
from joestar.kernels.gpu_segment_handed import hand_over_edges, handed_tensors
from joestar.kernels.gpu_segment_steps import (
    TAIL,
    added,
    checked,
    columns,
    described,
    edge_leaves,
    fill_behind,
    held_leaves,
    leaf_values,
    prepared,
    run_steps,
    store_tile,
    strides,
    tile_of,
    tiles_of,
    zeros,
)
from joestar.kernels.gpu_spmm import row_edges
from joestar.kernels.gpu_tiles import accumulator, tile_configs
from joestar.kernels.segment_gradient import SegmentGradient, check_rows, check_segment_wanted, segment_gradient
from joestar.kernels.segment_handover import Handover, handover
from joestar.kernels.segment_program import HEAD, SIZES, SegmentProgram, dtype_of, groups_of, repeated, tensors_apart

_AHEAD = 2
"""Edges of a destination that are read before the first is used."""


@triton.jit
def _store_edges(
    outs, values, e, valid, head, column, inside, part, num_edges,
    EDGES: tl.constexpr, OF_EDGES: tl.constexpr, SCALARS: tl.constexpr, RESULTS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of edges' rows, and of their scalars: the sum over the heads of part ``part``."""
    for s in tl.static_range(len(EDGES)):
        value = values[RESULTS[EDGES[s]]]
        store_tile(outs[EDGES[s]], e, value, valid, head, column, inside, OF_EDGES[s], HEADS, WIDTH)
    for s in tl.static_range(len(SCALARS)):
        known = head < HEADS
        value = tl.sum(tl.where(known, values[RESULTS[SCALARS[s]]], 0), 1, keep_dims=True)
        tl.store(outs[SCALARS[s]] + part * num_edges.to(tl.int64) + e, value, valid)


@triton.jit(do_not_specialize=["n", "num_edges"])
def _segment_grad_dst(
    indptr, indices, leaves, outs, partial, handed, n, num_edges,
    KINDS: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr, STRIDES: tl.constexpr, NAMES: tl.constexpr,
    READ: tl.constexpr, INTO: tl.constexpr, NUMBERS: tl.constexpr, RESULTS: tl.constexpr, FROM_SRC: tl.constexpr,
    DSTS: tl.constexpr, OF_DSTS: tl.constexpr, EDGES: tl.constexpr, OF_EDGES: tl.constexpr, SCALARS: tl.constexpr,
    SUMMED: tl.constexpr, OF_SUMMED: tl.constexpr,
    TIMES: tl.constexpr, NOTHING: tl.constexpr, OF_HEADS: tl.constexpr, GATES: tl.constexpr, SIDES: tl.constexpr,
    OF_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr, TAIL: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the leaves ``DSTS``, ``EDGES`` and ``SCALARS``, and the program's share of those of ``SUMMED``.

    ``handed``: what the second pass is given, see ``gpu_segment_handed``.
    ``partial`` ``[programs, len(SUMMED), WIDTH]``. ``OF_...``: sizes; ``INTO``: numbers between rows of ``outs``;
    ``NOTHING``: as many -1 as there are ``DSTS``.
    """
    part = tl.program_id(1)
    head, column, inside = columns(HEADS, HEAD_WIDTH, WIDTH, TALL, BLOCK)
    totals = zeros(OF_SUMMED, 0, ROWS, TALL, BLOCK, ACC)
    at_tile = tl.program_id(0)
    while at_tile * ROWS < n:
        i = at_tile * ROWS + tl.arange(0, ROWS)[:, None, None]
        start, end = row_edges(indptr, None, None, i, n)
        held = held_leaves(
            leaves, i, head, column, start < end, inside, KINDS, PLACES, COLUMNS, STRIDES, "dst", HEADS, HEAD_WIDTH,
            WIDTH, ACC,
        )  # fmt: skip
        longest = tl.max(end - start)
        sums = zeros(OF_DSTS, 0, ROWS, TALL, BLOCK, ACC)
        done = tl.zeros((), tl.int64)
        while done < longest:
            loaded = ()
            for j in tl.static_range(AHEAD):
                e = start + done + j
                source = e
                if FROM_SRC:
                    source = tl.load(indices + e, e < end, 0).to(tl.int64)
                leaf = edge_leaves(
                    leaves,
                    e,
                    source,
                    e < end,
                    head,
                    column,
                    inside,
                    KINDS,
                    PLACES,
                    COLUMNS,
                    STRIDES,
                    "dst",
                    HEADS,
                    HEAD_WIDTH,
                    WIDTH,
                    BLOCK,
                )
                loaded = loaded + (leaf,)  # noqa: RUF005
            for j in tl.static_range(AHEAD):
                e = start + done + j
                valid = e < end
                values = leaf_values(held, loaded[j], KINDS, COLUMNS, "dst", ACC)
                values = run_steps(values, inside, NAMES, READ, NUMBERS, ACC)
                sums = added(sums, values, loaded[j], valid, DSTS, NOTHING, RESULTS)
                totals = added(totals, values, loaded[j], valid, SUMMED, TIMES, RESULTS)
                _store_edges(
                    outs, values, e, valid, head, column, inside, part, num_edges,
                    EDGES, OF_EDGES, SCALARS, RESULTS, HEADS, WIDTH,
                )  # fmt: skip
                hand_over_edges(
                    handed, values, e, valid, head, inside, OF_HEADS, GATES, SIDES, HEADS, HEAD_WIDTH, ROWS, TALL, BLOCK
                )
            done += AHEAD
        for s in tl.static_range(len(DSTS)):
            own = outs[DSTS[s]]
            store_tile(own, i.to(tl.int64), sums[s], i < n, head, column, inside, OF_DSTS[s], HEADS, INTO[DSTS[s]])
        if len(OF_ROWS) > 0:
            nothing = edge_leaves(
                leaves, start, start, start < 0, head, column, inside, KINDS, PLACES, COLUMNS, STRIDES, "dst", HEADS,
                HEAD_WIDTH, WIDTH, BLOCK,
            )  # fmt: skip
            values = run_steps(
                leaf_values(held, nothing, KINDS, COLUMNS, "dst", ACC), inside, NAMES, READ, NUMBERS, ACC
            )
            for s in tl.static_range(len(OF_ROWS)):
                own = handed[len(OF_HEADS) + len(GATES) + s]
                store_tile(own, i.to(tl.int64), values[OF_ROWS[s]], i < n, head, column, inside, 2, HEADS, WIDTH)
        at_tile += tl.num_programs(0)
    for s in tl.static_range(len(SUMMED)):
        own = partial + (tl.program_id(0).to(tl.int64) * len(SUMMED) + s) * WIDTH
        total = tl.sum(totals[s], 0, keep_dims=True)
        store_tile(own, 0, total, n >= 0, head, column, inside, OF_SUMMED[s], HEADS, WIDTH)
    last, size = tl.load(indptr + n), num_edges.to(tl.int64)
    for s in tl.static_range(len(EDGES)):
        fill_behind(outs[EDGES[s]], last, num_edges, OF_EDGES[s], HEADS, WIDTH, TAIL)
    for s in tl.static_range(len(SCALARS)):
        fill_tail(outs[SCALARS[s]] + part * size, last, size, 0, TAIL)


def _constants(program: SegmentProgram, tensors: list[Tensor], line: SegmentGradient, wanted: list[bool]) -> dict:
    """What both passes know of the gradient's steps; leaves that they do not read are not loaded."""
    names = [kind if leaf in line.read else "none" for leaf, kind in enumerate(line.leaves)]
    for leaf, group in enumerate(groups_of(program.leaves, wanted)):
        if names[leaf] == "none" and len(group) > 1 and group[1]:
            names[leaf] = "features"
    return {**described(line.leaves, tensors, line.steps, names), "RESULTS": line.results}


def _grid_configs(width: int, size: int, sums: int) -> list[tune.Config]:
    """Rows, warps and programs of a pass that keeps ``sums`` tiles of float32, or half as many others; default first.

    Programs of one warp wait for no other and exchange nothing; many sums take more threads to a row.
    """
    per_warp = min(config["ROWS"] for config in tile_configs(width, size))
    tried = [(1, 1, 2112), (2, 4, 1056), (1, 2, 2112), (1, 4, 1056)]
    if sums > 8:
        tried.reverse()
    return [{"ROWS": per_warp * rows, "num_warps": warps, "GRID": grid} for rows, warps, grid in tried]


def _slots(program: SegmentProgram, line: SegmentGradient, wanted: list[bool], settings: dict) -> list[tuple]:
    """(leaf, feature or -1, place of the tensor) of every sum over all edges."""
    slots = []
    for leaf, (kind, result) in enumerate(zip(program.leaves, line.results, strict=True)):
        first = settings["PLACES"][leaf]
        if result < 0:
            continue
        if kind.startswith("vector"):
            slots.append((leaf, -1, first))
        elif kind.startswith("narrow"):
            slots += [(leaf, k, first + 1) for k in range(settings["COLUMNS"][leaf] if wanted[first + 1] else 0)]
            slots += [(leaf, -1, first + 2)] * (kind == "narrow" and wanted[first + 2])
    return slots


def _over_destinations(
    indptr: Tensor, indices: Tensor, tensors: tuple[Tensor, ...], program: SegmentProgram, cut: Handover,
    wanted: list[bool], out: list[Tensor], handed: tuple[Tensor, ...], settings: dict, name: tuple,
) -> None:  # fmt: skip
    """Fills the gradients of all leaves but sources' rows, and what is handed over."""
    line = cut.first
    n, edges, width, device = indptr.numel() - 1, indices.numel(), settings["WIDTH"], indptr.device
    wide, places = torch.promote_types(name[0], torch.float32), settings["PLACES"]
    parts, size = cdiv(settings["HEADS"], settings["TALL"]), name[0].itemsize
    of = {"dst": (), "edge": (), "scalar": ()}
    outs = [tensors[0]] * len(program.leaves)
    for leaf, (kind, result) in enumerate(zip(program.leaves, line.results, strict=True)):
        family = kind.removesuffix("_head")
        if result >= 0 and family in of:
            of[family] += (leaf,)
            scalar = kind == "scalar"
            outs[leaf] = torch.empty((parts, edges), dtype=wide, device=device) if scalar else out[places[leaf]]
    slots = _slots(program, line, wanted, settings)
    if not (slots or any(of.values())):
        return
    size_of = {key: tuple(SIZES[program.leaves[leaf]] for leaf in found) for key, found in of.items()}
    settings = {
        **settings, "FROM_SRC": any(kind.startswith("src") for kind in settings["KINDS"]), "DSTS": of["dst"],
        "OF_DSTS": size_of["dst"], "EDGES": of["edge"], "OF_EDGES": size_of["edge"], "SCALARS": of["scalar"],
        "NOTHING": (-1,) * len(of["dst"]), "INTO": strides(outs), "TAIL": TAIL,
        "AHEAD": ahead(program.leaves, settings, _AHEAD),
        "SUMMED": tuple(leaf for leaf, _, _ in slots), "TIMES": tuple(k for _, k, _ in slots),
        "OF_HEADS": cut.heads, "GATES": tuple(value for value, _ in cut.gates), "OF_ROWS": cut.rows,
        "SIDES": tuple(int(name == "leaky_relu_grad") for _, name in cut.gates),
        "OF_SUMMED": tuple(SIZES[program.leaves[leaf]] for leaf, _, _ in slots),
    }  # fmt: skip
    found = []

    def launch(config: tune.Config) -> None:
        config, tiles = dict(config), cdiv(n, config["ROWS"])
        grid = max(1, min(config.pop("GRID", tiles), tiles))
        partial = torch.empty((grid, len(slots), width), dtype=wide, device=device)
        if HEAD in settings["OF_SUMMED"]:
            partial.zero_()
        _segment_grad_dst[(grid, parts)](
            indptr, indices, tensors, tuple(outs), partial, handed, n, edges, **settings, **config
        )
        found[:] = [added_up(partial) if slots else partial]

    configs = tiles_of(settings, size)
    if slots:
        configs = _grid_configs(settings["TALL"] * settings["BLOCK"], size, len(slots) * (1 if size == 4 else 2))
    shape = (*name, *wanted, tune.size_class(n), tune.size_class(edges))
    launch(tune.choose("segment_grad_dst", shape, configs, launch, work_of(program, n, edges, width, size), device))
    for leaf in of["scalar"]:
        out[places[leaf]].copy_(outs[leaf].sum(0).view(out[places[leaf]].shape))
    for slot, (_, k, place) in enumerate(slots):
        if k < 0:
            out[place].copy_(found[0][slot][: out[place].numel()])
        elif k == 0:
            out[place].copy_(found[0][slot : slot + out[place].shape[1]].t())


@on_device
def segment_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, rows: list[Tensor],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """See ``joestar.ops.aggregate.segment``.

    The sums of sources' rows run in an order that changes between runs, but under
    ``torch.use_deterministic_algorithms(True)``.
    """
    indptr, indices, rows = indptr.contiguous(), indices.contiguous(), [row.contiguous() for row in rows]
    given, asked = leaves, wanted
    parsed, leaves, width = checked(indptr, indices, given, program, heads)
    wanted = repeated(parsed, asked)
    line = segment_gradient(parsed.apart, check_segment_wanted(parsed, leaves, wanted))
    check_rows(parsed, rows, indptr.numel() - 1, indices.numel(), width, heads)
    whole = [leaf.new_empty(leaf.shape if w else (0,)) for leaf, w in zip(given, asked, strict=True)]
    out = tensors_apart(parsed, whole)
    some = bool(width and indices.numel())
    for leaf, group in enumerate(groups_of(parsed.leaves, out)):
        if line.results[leaf] < 0 or not some:
            for tensor in group:
                tensor.zero_()
    if some:
        dtype, sizes = dtype_of(parsed, leaves), tile_of(parsed, width, heads)
        wide = torch.promote_types(dtype, torch.float32)
        cut = handover(line, heads, width, dtype.itemsize, wide.itemsize)
        settings = {**_constants(parsed, [*leaves, *rows], cut.first, wanted), **sizes, "ACC": accumulator(*rows)}
        name = (dtype, width, heads, program.replace(" ", "_"), len(cut.heads), len(cut.gates), len(cut.rows))
        tensors = prepared(line.leaves, [*leaves, *rows])
        handed = handed_tensors(cut, indices, indptr.numel() - 1, sizes, wide)
        _over_destinations(indptr, indices, tensors, parsed, cut, wanted, out, handed, settings, name)
        settings |= _constants(parsed, [*leaves, *rows, *handed], cut.second, [False] * len(wanted))
        over_sources(indptr, indices, (*tensors, *handed), parsed, cut.second, out, settings, name)
    return whole
