"""Factors of rows move behind the product (an epilogue, thesis 5.3.2): their scaled copies are not stored side by side.

Before (PNA)                                            After
    m = aten.mul(a, f)           a: [n, K], f: [n, 1]       w  = aten.split_with_sizes(weight, [F, K, K, K], 1)
    d = aten.div(a, f)                                      y0 = aten.linear(own, w[0])                   [n, C]
    c = aten.cat([own, a, m, d], 1)    [n, F + 3 K]         z  = aten.linear(a, aten.cat(w[1:], 0))       [n, 3 C]
    y = aten.linear(c, weight, b)            [n, C]         z  = aten.split_with_sizes(z, [C, C, C], 1)
                                                            y  = y0 + z[0] + z[1] * f + z[2] / f + b

Rows that occur under the same factors share one product with stacked weights; those without any are such a group, too.
That takes as many operations as before, but reads rows once, and neither their scaled copies nor the gradients of these
are written. One product for all groups would multiply zeros (15/13 of the operations in PNA, where K = 4 F) and store
own rows beside the others; a product for every factor would read ``a`` three times.

On a CPU, where factors are made of integers alone (degrees), few of them differ: rows that have the same ones share
one weight (``grouped``), ``z = scaled_linear(a, aten.cat([1, f, 1 / f], 1), aten.stack(w[1:]))``, for a third of the
operations here.

A choice ``factors:<weight>``, by default ``grouped`` where there is such a form and the batch is large, else what moves
fewer entries: ``results`` are scaled where C is small against the columns that are no longer stored, else ``rows``.
Results are scaled and added up in the wider of the factors' dtype and
their own, and rounded to their own once: under autocast, products are in a short dtype, factors in float32.

Must not fire without a factor ``[n, 1]``; when every factor needs gradients, changes the dtype of its rows, or has
scaled them for another reader, too (such rows count as rows without a factor); when the rows side by side have another
reader or another dtype, or are joined end to end; when some occur twice; when the number of weights is not fixed; when
rows or a factor are a view of what is written in the step; in float16, where rows may only be in range once they are
scaled. Rows that a factor of 0 divides are not finite in either form, but may be infinite in one and NaN in the other.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.match.emit import emit, is_column, name, tensor
from joestar.fusion.match.rounding import in_full, in_range
from joestar.fusion.record import Reject
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import expression, same_size

PATTERN = "row-factors"
ROWS, RESULTS, GROUPED = "rows", "results", "grouped"
_LEAST_GROUPED = 2048
"""Rows of the traced batch from which on those of one degree are worth a weight of their own."""
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_CAT, _LINEAR, _SPLIT = _ATEN.cat.default, _ATEN.linear.default, _ATEN.split_with_sizes.default
_STACK = _ATEN.stack.default
_MUL, _DIV = _ATEN.mul.Tensor, _ATEN.div.Tensor

Scale = tuple | None
"""``(aten.mul.Tensor or aten.div.Tensor, factor)``; ``None`` for rows as they are."""


@dataclass(frozen=True)
class _Group:
    """Rows that occur under the same factors.

    Attributes:
        rows: ``[n, K_i]`` each; scales: what they are multiplied by or divided by.
        positions: ``[scale][rows]`` among the operands of the concatenation.
    """

    rows: tuple[fx.Node, ...]
    scales: tuple[Scale, ...]
    positions: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Columns of the rows side by side."""
        return sum(map(_width, self.rows))


def run(gm: fx.GraphModule, context) -> int:
    """Moves factors behind the product of every concatenation that fits; returns of how many."""
    moved, taken = 0, {}
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    for node in list(gm.graph.nodes):
        if not _reads_scaled(node):
            continue
        match = _match(node, written, context)
        if match:
            site, options, default = _site(node.args[1], taken), *_forms(node, match, context)
            form = context.choose("factors", site, options, default, node)
            if form == ROWS:
                by_cost = default == ROWS and f"factors:{site}" not in context.choices
                match = Reject("scaling rows is chosen" + ", by cost" * by_cost)
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match, form == GROUPED, context)
            moved += 1
    return moved


def _site(weight: fx.Node, taken: dict[str, int]) -> str:
    """The parameter behind a product's weights, with a number if it was met before."""
    while weight.op != "placeholder" and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    taken[weight.name] = taken.get(weight.name, 0) + 1
    return weight.name if taken[weight.name] == 1 else f"{weight.name}.{taken[weight.name]}"


def _reads_scaled(linear: fx.Node) -> bool:
    """Whether a product reads rows side by side, some of them with a factor."""
    cat = linear.args[0] if linear.target is _LINEAR else None
    return cat is not None and cat.target is _CAT and any(_scaled(part) for part in cat.args[0])


def _scaled(node: fx.Node) -> tuple[fx.Node, Scale] | None:
    """(rows, scale) if the node scales every row by a number of its own."""
    if node.target not in (_MUL, _DIV) or node.kwargs:
        return None
    for rows, factor in (node.args, node.args[::-1])[: 2 if node.target is _MUL else 1]:
        matrix = tensor(rows) is not None and tensor(rows).dim() == 2 and is_column(factor)
        if matrix and rows is not factor and _as_many(rows, factor):
            return rows, (node.target, factor)
    return None


def _as_many(rows: fx.Node, factor: fx.Node) -> bool:
    return same_size(rows.meta["val"].shape[0], factor.meta["val"].shape[0])


# --- where it fits ---


def _match(linear: fx.Node, written: set[fx.Node], context) -> tuple[_Group, ...] | Reject:
    cat, weight = linear.args[:2]
    if any(tensor(part) is None or tensor(part).dim() != 2 for part in (weight, *cat.args[0])):
        return Reject("the rows or the weights are no matrices")
    if argument(cat, "dim") % 2 != 1:
        return Reject("the rows are joined end to end")
    if len(cat.users) != 1:
        return Reject(f"the rows side by side are also read by {_other(cat, linear)}")
    if any(expression(size) is not None for size in weight.meta["val"].shape):
        return Reject("the weights have as many entries as there are rows")
    stays = {part: _stays(part, cat, context) for part in cat.args[0] if _scaled(part)}
    if all(stays.values()):
        return Reject(next(iter(stays.values())))
    operands = [_scaled(part) if stays.get(part) == "" else (part, None) for part in cat.args[0]]
    if len(set(operands)) < len(operands):
        return Reject("the same rows occur twice")
    for rows, scale in operands:
        if rows.meta["val"].dtype != cat.meta["val"].dtype:
            return Reject("the rows side by side are converted to another dtype")
        if {root(rows), root(scale[1]) if scale else None} & written:
            return Reject(f"{rows.name} or its factor is written in the step")
    held = in_range(context, cat)
    return _groups(operands) if held else held


def _stays(part: fx.Node, cat: fx.Node, context) -> str:
    """Why the factor of an operand cannot move."""
    rows, (_, factor) = _scaled(part)
    if set(part.users) != {cat}:
        return f"the scaled rows are also read by {_other(part, cat)}"
    if part.meta["val"].dtype != rows.meta["val"].dtype:
        return "the factor converts the rows to another dtype"
    return "the factor needs gradients" if context.depends_on_grad(factor) else ""


def _other(node: fx.Node, reader: fx.Node) -> str:
    return name(next(user for user in node.users if user is not reader))


def _groups(operands: list[tuple[fx.Node, Scale]]) -> tuple[_Group, ...]:
    """Rows by the factors under which they occur, everything in the order of the operands, rows as they are first."""
    order = sorted(dict.fromkeys(scale for _, scale in operands), key=lambda scale: scale is not None)
    alike: dict[tuple[Scale, ...], list[fx.Node]] = {}
    for rows in dict.fromkeys(rows for rows, _ in operands):
        alike.setdefault(tuple(scale for scale in order if (rows, scale) in operands), []).append(rows)
    return tuple(
        _Group(tuple(rows), scales, tuple(tuple(operands.index((one, scale)) for one in rows) for scale in scales))
        for scales, rows in alike.items()
    )


# --- what either form costs ---


def _forms(linear: fx.Node, groups: tuple[_Group, ...], context) -> tuple[tuple[str, ...], str]:
    """(the forms that there are, the default)."""
    cheaper = _cheaper(linear, groups, context)
    several = [group for group in groups if len(group.scales) > 1]
    factors = [scale[1] for group in several for scale in group.scales if scale]
    if context.device != "cpu" or not in_full(context, linear) or not several or not all(map(_of_integers, factors)):
        return (ROWS, RESULTS), cheaper
    large = context.size(linear.meta["val"].shape[0]) >= _LEAST_GROUPED
    return (ROWS, RESULTS, GROUPED), GROUPED if large else cheaper


def _of_integers(factor: fx.Node) -> bool:
    """Whether a value is made of integers and Python's numbers alone."""
    seen, left = set(), [factor]
    while left:
        node = left.pop()
        value = tensor(node)
        if node in seen or (value is not None and not value.dtype.is_floating_point):
            continue
        if node.op != "call_function" or not node.all_input_nodes:
            return False
        seen.add(node)
        left += node.all_input_nodes
    return True


def _cheaper(linear: fx.Node, groups: tuple[_Group, ...], context) -> str:
    """The form that moves fewer entries per row, forward and backward; both take as many operations.

    Whatever a product reads is read again for the gradient of the weights, and has a gradient that is written and read,
    if rows are trained. Whatever it gives is written and read, and so is its gradient (twice, if rows are trained).
    """
    trained = int(context.depends_on_grad(linear.args[0]))
    columns = int(linear.meta["val"].shape[1])

    def given(results: int) -> int:
        return (4 + trained) * results

    def read(width: int, made: bool) -> int:
        return (2 + made + 2 * trained) * width

    rows = read(_width(linear.args[0]), True) + given(columns)
    results = sum(read(group.width, len(group.rows) > 1) + given(columns * len(group.scales)) for group in groups)
    return RESULTS if results < rows else ROWS


def _width(rows: fx.Node) -> int:
    return int(rows.meta["val"].shape[1])


# --- the other form ---


def _rewrite(graph: fx.Graph, linear: fx.Node, groups: tuple[_Group, ...], grouped: bool, context) -> None:
    cat = linear.args[0]
    with graph.inserting_before(linear):
        weights = _split(graph, linear, linear.args[1], [_width(part) for part in cat.args[0]])
        terms: dict[Scale, list[fx.Node]] = {}
        for group in groups:
            if grouped and len(group.scales) > 1:
                terms.setdefault(None, []).append(_by_factors(graph, linear, group, weights))
                continue
            for scale, result in zip(group.scales, _products(graph, linear, group, weights), strict=True):
                terms.setdefault(scale, []).append(result)
        new = _added(graph, linear, terms, context)
    factors = len({scale for group in groups for scale in group.scales if scale})
    context.fired(PATTERN, new, f"{_width(cat)} columns are {sum(group.width for group in groups)}, {factors} factors")
    linear.replace_all_uses_with(new)
    for node in dict.fromkeys((linear, cat, *cat.args[0])):
        if node in (linear, cat) or (_scaled(node) and not node.users):
            graph.erase_node(node)


def _products(graph: fx.Graph, linear: fx.Node, group: _Group, weights: list[fx.Node]) -> list[fx.Node]:
    """The products of a group's rows, ``[n, C]`` for each of its scales."""
    rows = _joined(graph, linear, group.rows, 1)
    parts = [_joined(graph, linear, [weights[i] for i in positions], 1) for positions in group.positions]
    product = emit(graph, linear, _LINEAR, rows, _joined(graph, linear, parts, 0))
    columns = int(linear.meta["val"].shape[1])
    return _split(graph, linear, product, [columns] * len(parts)) if len(parts) > 1 else [product]


def _by_factors(graph: fx.Graph, linear: fx.Node, group: _Group, weights: list[fx.Node]) -> fx.Node:
    """The sum of a group's products, ``[n, C]``, factors included."""
    rows = _joined(graph, linear, group.rows, 1)
    parts = [_joined(graph, linear, [weights[i] for i in positions], 1) for positions in group.positions]
    factors = [_factor(graph, linear, scale, group.scales, rows) for scale in group.scales]
    factors = emit(graph, linear, _CAT, factors, 1)
    return emit(graph, linear, _JOESTAR.scaled_linear.default, rows, factors, emit(graph, linear, _STACK, parts))


def _factor(graph: fx.Graph, like: fx.Node, scale: Scale, scales: tuple[Scale, ...], rows: fx.Node) -> fx.Node:
    """What a scale multiplies by, ``[n, 1]`` in the dtype of the rows; ones for none."""
    if scale is None:
        other = next(one[1] for one in scales if one)
        return emit(graph, like, _ATEN.ones_like.default, _factor(graph, like, (_MUL, other), scales, rows))
    factor = emit(graph, like, _ATEN.type_as.default, scale[1], rows)
    return factor if scale[0] is _MUL else emit(graph, like, _ATEN.reciprocal.default, factor)


def _added(graph: fx.Graph, linear: fx.Node, terms: dict[Scale, list[fx.Node]], context) -> fx.Node:
    """The sum of the scaled results and the bias, in the dtype of the results."""

    def add(values) -> fx.Node:
        first, *others = values
        for value in others:
            first = emit(graph, linear, _ATEN.add.Tensor, first, value)
        return first

    some = next(iter(terms.values()))[0]
    sums = [(scale, add(results)) for scale, results in terms.items()]
    total = add(result if scale is None else emit(graph, linear, scale[0], result, scale[1]) for scale, result in sums)
    bias = linear.args[2] if len(linear.args) > 2 else None
    if bias is not None and (context.device != "cuda" or not context.depends_on_grad(bias)):
        total, bias = emit(graph, linear, _ATEN.add.Tensor, total, bias), None
    total = emit(graph, linear, _ATEN.type_as.default, total, some)
    return total if bias is None else emit(graph, linear, _JOESTAR.add_bias.default, total, bias)


def _joined(graph: fx.Graph, like: fx.Node, parts, dim: int) -> fx.Node:
    return parts[0] if len(parts) == 1 else emit(graph, like, _CAT, list(parts), dim)


def _split(graph: fx.Graph, like: fx.Node, matrix: fx.Node, widths: list[int]) -> list[fx.Node]:
    """The columns of a matrix in parts; the gradients of all are put together in one pass."""
    every = emit(graph, like, _SPLIT, matrix, widths, 1)
    return [emit(graph, like, operator.getitem, every, i) for i in range(len(widths))]
