"""Ops that move entries around: padded rows must stay behind the valid ones."""

import itertools
import operator

import sympy
from torch import fx

from joestar.lowering.rules.arguments import argument, dims
from joestar.lowering.rules.rowwise import columns_only
from joestar.lowering.sizes import expression, padded_dims, same_size


def _joined(context, node: fx.Node) -> None:
    """``cat`` and ``stack``: along columns they are safe, along rows the padding would end up in the middle."""
    parts = [part.meta["val"] for part in node.args[0]]
    if "stack" in node.target._schema.name:
        return
    dim = argument(node, "dim") % node.meta["val"].dim()
    if any(expression(part.shape[dim]) is not None for part in parts if part.dim() > dim):  # others are empty ones
        remedy = "Concatenate columns (dim=1), or aggregate each set first."
        if dim:
            remedy = "Of the parts: torch.logaddexp(a.logsumexp(1), b.logsumexp(1)), a.sum(1) + b.sum(1)."
        raise context.refuse(node, "joins sets of padded rows end to end", remedy)


def _slice(context, node: fx.Node) -> None:
    """A leading part that is itself a known set (``x[:block.num_dst]``) is safe; so is shifting an indptr."""
    source, result = node.args[0].meta["val"], node.meta["val"]
    dim = argument(node, "dim") % source.dim()
    before, after = expression(source.shape[dim]), expression(result.shape[dim])
    if before is None:
        return
    start = argument(node, "start") or 0
    step = argument(node, "step") or 1
    ends = start in (0, 1) and after is not None and not before.is_Symbol and sympy.expand(before - after) == 1
    whole = start == 0 and same_size(source.shape[dim], result.shape[dim])
    if step == 1 and (whole or ends or (start == 0 and context.table.begins(after, before))):
        return
    raise context.refuse(
        node, "cuts padded rows at a place that is not a set of its own",
        "Only x[:block.num_dst] (the destinations of a block) can be cut off.",
    )  # fmt: skip


def _select(context, node: fx.Node) -> None:
    value = node.args[0].meta["val"]
    if expression(value.shape[argument(node, "dim") % value.dim()]) is not None:
        raise context.refuse(node, "picks a single padded row by position", "Select rows by node id before sampling.")


def _view(context, node: fx.Node) -> None:
    """A reshape is safe while padded rows stay behind the valid ones: nothing moves in front of a padded dimension.

    Or if only products see the rows in that order, and another one puts them back, as ``nn.MultiheadAttention`` does.
    """
    source, result = node.args[0].meta["val"], node.meta["val"]
    if not _keeps_rows(_sizes(source), _sizes(result)) and node not in context.put_back:
        ends = _put_back(node)
        if ends is not None:
            context.put_back |= ends
            return
        remedy = "Keep the node dimension first."
        if len(padded_dims(source)) > 1:
            remedy = (
                "Reduce one dimension after the other: x.sum(1).sum(0); of what a mask picks, in place of "
                "x[mask].mean(): torch.where(mask, x, 0).sum(1).sum(0) / mask.sum(1).sum(0)."
            )
        raise context.refuse(
            node, f"reshapes {tuple(source.shape)} to {tuple(result.shape)}, which interleaves padded rows", remedy
        )


def _put_back(node: fx.Node) -> set[fx.Node] | None:
    """The reshapes after products of a matrix of interleaved rows that restore the order; ``None`` if any does not."""
    source, matrix = _sizes(node.args[0].meta["val"]), _sizes(node.meta["val"])
    ends, among = set(), [node]
    while among:
        rows = among.pop()
        for user in rows.users:
            name = getattr(user.target, "_schema", None) and user.target._schema.name.partition("::")[2]
            inner = {part for other in user.all_input_nodes if other is not rows for part in _symbols(other)}
            outer = _sizes(user.meta["val"])[:-1] if name in _VIEWS else []
            same = sympy.expand(sympy.prod(outer) - matrix[0]) == 0
            if name in _VIEWS and same and _keeps_rows(source, [*outer, *matrix[1:]]):
                ends.add(user)
            elif name == "linear" and user.args[0] is rows and len(matrix) == 2 and not inner:
                among.append(user)
            else:
                return None
    return ends


def _symbols(node: fx.Node) -> set:
    return set().union(*(size.free_symbols for size in padded_dims(node.meta.get("val")).values()))


def _sizes(value) -> list[sympy.Expr]:
    return [sympy.Integer(size) if expression(size) is None else expression(size) for size in value.shape]


def _keeps_rows(source: list[sympy.Expr], result: list[sympy.Expr]) -> bool:
    """Whether every padded dimension of either shape leads the dimensions that it is split from or merged with."""
    for before, after in _groups(source, result):
        padded = [[dim for dim, size in enumerate(sizes) if size.free_symbols] for sizes in (before, after)]
        if not any(padded) or before == after:
            continue
        for sizes, found in zip((before, after), padded, strict=True):
            if len(found) != 1 or sympy.prod(sizes[: found[0]]) != 1:
                return False
    return True


def _groups(source: list[sympy.Expr], result: list[sympy.Expr]):
    """Cuts two shapes of the same number of entries into the smallest pieces that correspond to each other."""
    symbols = sorted(set().union(*(size.free_symbols for size in (*source, *result))), key=str)
    values = {symbol: sympy.prime(10_000 + 97 * position) for position, symbol in enumerate(symbols)}
    numbers = [[size.xreplace(values) for size in sizes] for sizes in (source, result)]
    ends = [list(itertools.accumulate(sizes, operator.mul, initial=1)) for sizes in numbers]
    start = [0, 0]
    for common in sorted(set(ends[0][1:]) & set(ends[1][1:])):
        stop = [max(i for i, product in enumerate(products) if product == common) for products in ends]
        yield source[start[0] : stop[0]], result[start[1] : stop[1]]
        start = stop
    yield source[start[0] :], result[start[1] :]


def _repeat(context, node: fx.Node) -> None:
    value, repeats = node.args[0].meta["val"], list(node.args[1])
    own = ([1] * value.dim() + repeats)[-value.dim() :]  # dimensions in front of them are new ones
    if any(own[dim] != 1 for dim in padded_dims(value)):
        raise context.refuse(node, "repeats padded rows", "Repeat columns, or use index_select.")


def _pad(context, node: fx.Node) -> None:
    value = node.args[0].meta["val"]
    touched = {value.dim() - 1 - dim for dim in range(len(node.args[1]) // 2)}
    if touched & padded_dims(value).keys():
        raise context.refuse(node, "adds entries around padded rows", "Pad columns only.")


def _arange(context, node: fx.Node) -> None:
    """Counting from a constant upwards: the valid entries come first, and hold what they hold without padding."""
    names = [a.name for a in node.target._schema.arguments]
    start, step = (argument(node, name) if name in names else None for name in ("start", "step"))
    if isinstance(start, fx.Node) or isinstance(step, fx.Node) or (step is not None and step < 0):
        raise context.refuse(node, "counts from the end of a padded set", "Count upwards from a constant.")


def _moved(context, node: fx.Node) -> None:
    """``flip`` and ``roll``."""
    value = node.args[0].meta["val"]
    if any(expression(value.shape[dim]) is not None for dim in dims(node, value.dim())):
        raise context.refuse(node, "moves padded rows in front of valid ones", "Move columns only.")


def _diagonal(context, node: fx.Node) -> None:
    """Entry ``i`` is of row ``i`` and column ``i``: of a square of padded rows the valid ones come first."""
    value, result = node.args[0].meta["val"], node.meta["val"]
    matrix = max(value, result, key=lambda each: each.dim())
    ends = [end % matrix.dim() for end in (argument(node, name) for name in ("dim1", "dim2")) if end is not None]
    first, second = ends or (0, 1)
    sizes = [matrix.shape[first], matrix.shape[second]]
    offset = argument(node, "offset") or argument(node, "diagonal")
    if any(expression(size) is not None for size in sizes) and (offset or not same_size(*sizes)):
        raise context.refuse(
            node, "takes a diagonal beside the main one, or of no square, of padded rows", "Use the main diagonal."
        )


def _trace(context, node: fx.Node) -> None:
    if padded_dims(node.args[0].meta["val"]):
        raise context.refuse(node, "adds up padded rows", "Write x.diagonal().sum().")


def _along_columns(name: str):
    """A rule for an op that is safe along another dimension than that of padded rows, which ``name`` names."""

    def rule(context, node: fx.Node) -> None:
        dim, value = argument(node, name), node.args[0].meta["val"]
        if dim is None or expression(value.shape[dim % value.dim()]) is not None:
            raise context.refuse(node, "works along padded rows", "Work along columns (dim=1).")

    return rule


def _among(context, node: fx.Node) -> None:
    """``isin``: every entry on its own, if those it is looked for among are not padded."""
    among = argument(node, "test_elements")
    if isinstance(among, fx.Node) and padded_dims(among.meta.get("val")):
        raise context.refuse(
            node, "looks among padded rows",
            "Compare with each, (ids[:, None] == among).any(1); look among a tensor of a fixed size, or mark nodes in "
            "graph.ndata.",
        )  # fmt: skip


_VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_as")

RULES = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split"), columns_only),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(("unbind", "glu"), columns_only),
    **dict.fromkeys(("flip", "roll"), _moved),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("diag", "diagonal", "diag_embed", "linalg_diagonal", "diagonal_copy"), _diagonal),
    "repeat_interleave": _along_columns("dim"),
    "unfold": _along_columns("dimension"),
    "isin": _among,
    "trace": _trace,
    "select": _select,
    "arange": _arange,
}
