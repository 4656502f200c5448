"""Column-leaves: rows that a segment op reads, and that are columns of one matrix, are read in that matrix.

Before                                                   After
    t = aten.linear(own, w, b)         t: [num_dst, 2 W]     t = aten.linear(own, w, b)
    beta, gamma = aten.chunk(t, 2, 1)                        y, = segment(indptr, indices, [h, t],
    y, = segment(indptr, indices, [h, gamma, beta],               "src dst dst+ | mul 2 0 | add 3 1 -> sum 4", 1)
         "src dst dst | mul 1 0 | add 3 2 -> sum 4", 1)

No columns are copied, and the gradient of the matrix is written as one: no parts are put together. Keys and values of
one product (``kv.chunk(2, -1)``) are columns of the rows of sources in the same way.

Must not fire when leaves leave out columns of the matrix or are not as wide as one another, or when the columns have
another reader: their gradients would be added to ours, padded with zeros.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.edges.edge_steps import fixed
from joestar.fusion.match.emit import emit, erase_unread, name, tensor
from joestar.fusion.record import Reject
from joestar.kernels.segment_program import BESIDE, SegmentProgram, groups_of
from joestar.kernels.segment_steps import renumbered
from joestar.lowering.rules.arguments import argument

PATTERN = "column-leaves"
_ATEN, _SEGMENT = torch.ops.aten, torch.ops.joestar.segment.default
_PARTS = {
    _ATEN.chunk.default, _ATEN.split.Tensor, _ATEN.split.sizes, _ATEN.split_with_sizes.default,
    _ATEN.tensor_split.sections,
}  # fmt: skip


@dataclass(frozen=True)
class _Columns:
    """Columns of a matrix, the first one's number, and the leaf that reads them."""

    matrix: fx.Node
    first: int
    leaf: int


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every segment op that fits; returns how many."""
    made = 0
    for node in list(gm.graph.find_nodes(op="call_function", target=_SEGMENT)):
        match = _match(node)
        if match is not None and context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match, context)
            made += 1
    return made


def columns_of(node: fx.Node, leaf: int) -> _Columns | None:
    """What matrix a leaf's rows are columns of."""
    if node.target is operator.getitem and node.args[0].target in _PARTS:
        parts, index = node.args
        matrix, before = parts.args[0], parts.meta["val"][:index]
        return _Columns(matrix, sum(part.shape[1] for part in before), leaf) if _of_columns(parts, matrix) else None
    if node.target is _ATEN.slice.Tensor and _of_columns(node, node.args[0]) and argument(node, "step") == 1:
        first = argument(node, "start") or 0
    elif node.target is _ATEN.narrow.default and _of_columns(node, node.args[0]):
        first = argument(node, "start")
    else:
        return None
    if not isinstance(first, int):
        return None
    return _Columns(node.args[0], first + (first < 0) * int(tensor(node.args[0]).shape[1]), leaf)


def _of_columns(cut: fx.Node, matrix: fx.Node) -> bool:
    value = tensor(matrix)
    return value is not None and value.dim() == 2 and fixed(value.shape[1:]) and argument(cut, "dim") in (1, -1)


def _match(node: fx.Node) -> list[list[_Columns]] | Reject | None:
    """Leaves side by side, in the order of their columns; ``None`` where no leaves are columns of the same matrix."""
    program = SegmentProgram.parse(node.args[3])
    if program.beside:
        return None
    found: dict[tuple, list[_Columns]] = {}
    groups = groups_of(program.leaves, node.args[2])
    for leaf, (kind, (rows, *_)) in enumerate(zip(program.leaves, groups, strict=True)):
        columns = columns_of(rows, leaf) if kind in BESIDE else None
        if columns is not None:
            found.setdefault((kind, columns.matrix), []).append(columns)
    several = [sorted(part, key=lambda columns: columns.first) for part in found.values() if len(part) > 1]
    fitting = [part for part in several if not _obstacle(node, part, groups)]
    if several and not fitting:
        return Reject(_obstacle(node, several[0], groups))
    return fitting or None


def _obstacle(node: fx.Node, part: list[_Columns], groups: list[tuple]) -> str:
    """Why leaves cannot be read in their matrix; empty if they can."""
    cuts = [groups[columns.leaf][0] for columns in part]
    if any(len(cut.users) != 1 for cut in cuts):
        return f"columns of {part[0].matrix.name} have another reader"
    width, all_columns = (int(tensor(rows).shape[1]) for rows in (cuts[0], part[0].matrix))
    if [columns.first for columns in part] != list(range(0, all_columns, width)) or all_columns % width:
        return f"the leaves are not all columns of {part[0].matrix.name}"
    return ""


def _rewrite(graph: fx.Graph, node: fx.Node, parts: list[list[_Columns]], context) -> None:
    program = SegmentProgram.parse(node.args[3])
    groups = groups_of(program.leaves, node.args[2])
    part_of = {columns.leaf: part for part in parts for columns in part}
    order, beside, operands = [], [], []
    for leaf, group in enumerate(groups):
        part = part_of.get(leaf)
        if leaf in order:
            continue
        operands += group if part is None else [part[0].matrix]
        order += [leaf] if part is None else [columns.leaf for columns in part]
        beside += [] if part is None else range(len(order) - len(part) + 1, len(order))
    place = {leaf: position for position, leaf in enumerate(order)}
    steps, results = (
        tuple(renumbered(line, lambda value: place.get(value, value)) for line in program.steps),
        tuple((result[0], *(place.get(value, value) for value in result[1:])) for result in program.results),
    )
    kinds = tuple(program.leaves[leaf] for leaf in order)
    whole = SegmentProgram(kinds, steps, results, tuple(beside))
    with graph.inserting_before(node):
        new = emit(graph, node, _SEGMENT, *node.args[:2], operands, str(whole), *node.args[4:])
    matrices = ", ".join(name(part[0].matrix) for part in parts)
    context.fired(PATTERN, new, f"{sum(map(len, parts))} leaves are columns of {matrices}")
    node.replace_all_uses_with(new)
    erase_unread(graph, node)
