"""How operations work on rows: which of them can be carried out for some rows at a time, and what of each operand that
needs.

Layer-wise inference evaluates a program for a range of nodes and their in-edges. An operation whose row ``i`` needs
nothing but row ``i`` of its operands runs on the range (``ROW``); an aggregation reads rows of its sources anywhere
(``ALL``); everything else is computed for all rows at once.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from joestar.fusion.edges.edge_steps import leaves_of
from joestar.lowering.rules.pointwise_ops import POINTWISE
from joestar.torch_private import OpOverload

ROW, ALL, FIXED = "row", "all", "fixed"
"""What of an operand is read: the same rows, any rows, or a tensor without rows."""

_JOESTAR = torch.ops.joestar
_SIZED = {
    **dict.fromkeys(("view", "view_copy", "reshape", "_unsafe_view", "expand", "expand_copy"), 1),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), 1),
    **dict.fromkeys(("zeros", "ones", "empty", "full"), 0),
}  # fmt: skip
"""Operations that are told the shape of their result: position of that argument."""
_LIKE = {
    "to", "_to_copy", "clone", "contiguous", "detach", "alias", "type_as", "float", "double", "half", "bfloat16",
    "bool", "int", "long", "zeros_like", "ones_like", "full_like", "empty_like", "lift_fresh_copy", "expand_as",
}  # fmt: skip
_PRODUCTS = {"linear", "mm", "matmul", "addmm", "bmm", "baddbmm"}
_OVER_DIMS = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "norm", "linalg_vector_norm", "std", "var",
    "logsumexp", "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "topk", "all",
    "any", "median", "var_mean", "std_mean", "count_nonzero", "logcumsumexp", "nansum", "nanmean", "cat", "concat",
    "stack",
    "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "squeeze", "unsqueeze", "unflatten",
    "gather", "take_along_dim", "index_select", "flip", "glu",
}  # fmt: skip
"""Operations along dimensions that they are given: each row on its own unless dimension 0 is among them."""


@dataclass
class Access:
    """How an operation runs on a range of rows.

    Attributes:
        reads: (operand, ``ROW``, ``ALL`` or ``FIXED``) of every tensor operand.
        segments: whether it works on the in-edges of destinations; its first argument are then their offsets.
        sized: position of the argument that is the shape of the result, or ``None``.
    """

    reads: list[tuple]
    segments: bool = False
    sized: int | None = None


def access(value) -> Access | None:
    """How a ``Value`` that has rows may be computed for some of them; ``None``: only for all at once."""
    if value.target is operator.getitem:
        return Access([(value.args[0], ROW)]) if value.args[0].space is value.space else None
    if value.target in OVER_SEGMENTS:
        return _segments(value)
    if not isinstance(value.target, OpOverload) or value.target.namespace not in ("aten", "joestar"):
        return None
    reads = _same_rows(value)
    if reads is None:
        return None
    name = value.target._schema.name.partition("::")[2]
    rule = _RULES.get(name) or (_over_dims if name in _OVER_DIMS else _pointwise if name in POINTWISE else None)
    if rule is None:
        return None
    found = rule(value, reads)
    return Access(reads, sized=_SIZED.get(name)) if found is True else found or None


def _same_rows(value) -> list[tuple] | None:
    """Operands with the result's rows, and those without rows; ``None`` if there are others."""
    reads = []
    for operand in value.operands():
        if operand.space is value.space:
            reads.append((operand, ROW))
        elif operand.fixed:
            reads.append((operand, FIXED))
        elif operand is not _table(value):
            return None
        else:
            reads.append((operand, ALL))
    return reads


def _table(value):
    """What a lookup by rows reads anywhere."""
    name = value.target._schema.name.partition("::")[2]
    return value.args[0] if name in ("index_select", "index", "embedding") else None


# --- rules: True, an ``Access``, or anything false for none ---


def _argument(value, name: str):
    for position, argument in enumerate(value.target._schema.arguments):
        if argument.name == name:
            given = (
                value.args[position] if position < len(value.args) else value.kwargs.get(name, argument.default_value)
            )
            return given
    return None


def _rank(operand) -> int:
    return operand.meta.dim()


def _pointwise(value, reads) -> bool:
    """Rows of operands stand in dimension 0 of the result, and nothing else does."""
    rank = _rank(value)
    return all(
        _rank(operand) == rank if how is ROW else _rank(operand) < rank or int(operand.meta.shape[0]) == 1
        for operand, how in reads
    )


def _like(value, reads) -> bool:
    first = value.args[0]
    return reads[0][0] is first and (reads[0][1] is ROW or _schema_name(value) == "expand_as")


def _schema_name(value) -> str:
    return value.target._schema.name.partition("::")[2]


def _product(value, reads) -> bool:
    name, how = _schema_name(value), {id(operand): kind for operand, kind in reads}
    left = value.args[1] if name in ("addmm", "baddbmm") else value.args[0]
    right = value.args[2] if name in ("addmm", "baddbmm") else value.args[1]
    if how[id(left)] is not ROW or _rank(left) < 2:
        return False
    if how[id(right)] is ROW:
        return name in ("bmm", "baddbmm", "matmul") and _rank(left) == _rank(right) >= 3
    if name == "addmm" and how[id(value.args[0])] is FIXED and _rank(value.args[0]) > 1:
        return int(value.args[0].meta.shape[0]) == 1
    return name not in ("bmm", "baddbmm") and _rank(right) <= 2


def _over_dims(value, reads) -> bool:
    """Along dimensions other than 0; all operands have the rows, but for an index into columns."""
    name = _schema_name(value)
    if name in ("max", "min") and len(reads) == 2:
        return _pointwise(value, reads)
    if name == "index_select" and _dims(value) == [0]:
        return _lookup(value, reads)
    if name in ("cat", "concat", "stack"):
        dims = _dims(value, _rank(value))
        return 0 not in dims and all(how is ROW for _, how in reads)
    if reads[0][1] is not ROW or reads[0][0] is not value.args[0]:
        return False
    if name == "unsqueeze":
        return 0 not in _dims(value, _rank(value.args[0]) + 1)
    dims = _dims(value)
    return bool(dims) and 0 not in dims


def _dims(value, rank: int | None = None) -> list[int]:
    """Dimensions along which it works, counted from the front; none if it names none, or might mean all."""
    rank = _rank(value.args[0]) if rank is None else rank
    names = [argument.name for argument in value.target._schema.arguments]
    name = next((name for name in ("dim", "dims") if name in names), None)
    given = None if name is None else _argument(value, name)
    if given is None:
        return []
    return [dim % rank for dim in (given if isinstance(given, (list, tuple)) else [given])]


def _lookup(value, reads) -> Access | bool:
    """``table[index]`` with an index per row."""
    index = value.args[1][0] if isinstance(value.args[1], (list, tuple)) else value.args[-1]
    index = value.args[2] if _schema_name(value) == "index_select" else index
    if isinstance(value.args[1], (list, tuple)) and len(value.args[1]) != 1:
        return False
    if index is None or index.space is not value.space or index.meta.dtype is torch.bool:
        return False
    table = value.args[0]
    return Access([(table, FIXED if table.fixed else ALL), (index, ROW)])


def _stored(value, reads) -> bool:
    """Rows of a store's table by an id per row: they need not be on the device all at once."""
    return [how for _, how in reads] == [FIXED] * (len(reads) - 1) + [ROW]


def _embedding(value, reads) -> Access | bool:
    if value.args[1].space is not value.space:
        return False
    return Access([(value.args[0], FIXED if value.args[0].fixed else ALL), (value.args[1], ROW)])


def _view(value, reads) -> bool:
    return len(reads) == 1 and reads[0][1] is ROW and isinstance(value.args[1], (list, tuple))


def _created(value, reads) -> bool:
    return True


def _flatten(value, reads) -> bool:
    return reads[0][1] is ROW and (_argument(value, "start_dim") or 0) % _rank(value.args[0]) > 0


def _expand(value, reads) -> bool:
    (operand, how), rank = reads[0], _rank(value)
    return _rank(operand) == rank if how is ROW else _rank(operand) < rank or int(operand.meta.shape[0]) == 1


def _permute(value, reads) -> bool:
    return reads[0][1] is ROW and value.args[1][0] % _rank(value) == 0


def _transpose(value, reads) -> bool:
    rank = _rank(value)
    return reads[0][1] is ROW and 0 not in (value.args[1] % rank, value.args[2] % rank)


def _repeat(value, reads) -> bool:
    return reads[0][1] is ROW and len(value.args[1]) == _rank(value.args[0]) and value.args[1][0] == 1


def _layer_norm(value, reads) -> bool:
    return reads[0][1] is ROW and _rank(value.args[0]) > len(value.args[1]) and all(h is FIXED for _, h in reads[1:])


def _group_norm(value, reads) -> bool:
    return reads[0][1] is ROW and _rank(value.args[0]) >= 2 and all(how is FIXED for _, how in reads[1:])


def _batch_norm(value, reads) -> bool:
    frozen = _argument(value, "training") is False
    return frozen and reads[0][1] is ROW and all(how is FIXED for _, how in reads[1:])


def _einsum(value, reads) -> bool:
    """Spelled out, with the rows' letter first wherever there are rows, and nowhere else."""
    inputs, arrow, result = value.args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or "." in value.args[0] or not result:
        return False
    letter, how = result[0], {id(operand): kind for operand, kind in reads}
    for term, operand in zip(terms, value.args[1], strict=True):
        rows = how[id(operand)] is ROW
        if rows != (term[:1] == letter) or letter in term[1:]:
            return False
    return letter not in result[1:]


def _attention(value, reads) -> bool:
    ranked = [operand for operand, _ in reads[:3]]
    return len(reads) == 3 and all(how is ROW and _rank(operand) >= 3 for (operand, how) in reads) and len(ranked) == 3


def _convolution(rank: int) -> Callable:
    def rule(value, reads) -> bool:
        return reads[0][1] is ROW and _rank(value.args[0]) == rank and all(how is FIXED for _, how in reads[1:])

    return rule


def _one_hot(value, reads) -> bool:
    return reads[0][1] is ROW and len(value.args) > 1 and value.args[1] > 0


def _head_linear(value, reads) -> bool:
    return [how for _, how in reads] == [ROW, FIXED]


def _scaled_linear(value, reads) -> bool:
    return [how for _, how in reads] == [ROW, ROW, FIXED]


_RULES = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_LIKE, _like),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "view_copy"), _view),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full", "zeros", "ones", "empty", "full"), _created),
    **dict.fromkeys(("expand", "expand_copy"), _expand),
    **dict.fromkeys(("transpose", "swapaxes"), _transpose),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), _layer_norm),
    "permute": _permute,
    "flatten": _flatten,
    "repeat": _repeat,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "einsum": _einsum,
    "expect": _pointwise,
    "index": _lookup,
    "embedding": _embedding,
    "gather_rows": _stored,
    "gather_shards": _stored,
    "one_hot": _one_hot,
    "scaled_dot_product_attention": _attention,
    "conv1d": _convolution(3),
    "conv2d": _convolution(4),
    "head_linear": _head_linear,
    "scaled_linear": _scaled_linear,
}


# --- aggregations and edges ---


def _segments(value) -> Access | None:
    """Operations over the in-edges of destinations: sources are read anywhere, the rest on the range."""
    indptr, edges = value.args[0], value.edges
    if indptr is None or edges is None:
        return None
    found = OVER_SEGMENTS[value.target](value, edges)
    if found is None:
        return None
    reads = [(operand, how) for operand, how in found if operand is not None]
    for operand, how in reads:
        wanted = {"edge": edges, "dst": value.nodes}.get(how)
        if wanted is not None and operand.space is not wanted:
            return None
        if how == FIXED and not operand.fixed:
            return None
    plain = [(operand, ROW if how in ("edge", "dst") else how) for operand, how in reads]
    return Access([(indptr, ALL), *plain], segments=True)


def _spmm(value, edges):
    _, indices, x, weight, _ = value.args
    if in_order(indices) and x.space is edges:
        return [(x, "edge"), (weight, "edge")]
    return [(indices, "edge"), (x, ALL), (weight, "edge")]


def in_order(indices) -> bool:
    """Whether ids are 0, 1, 2, ...: each destination reduces values of its own edges."""
    return indices.target is torch.ops.aten.arange.default


def _segment(value, edges):
    _, indices, leaves, program, _ = value.args
    reads = [(indices, "edge")]
    for family, (first, *rest) in leaves_of(program, leaves):
        how = {"src": ALL, "dst": "dst", "vector": FIXED}.get(family, "edge")
        reads += [(first, how), *((operand, FIXED) for operand in rest)]
    return reads


def _attend(value, edges):
    _, indices, s_src, s_dst, x, _, bits, _, *s_edge = value.args
    reads = [(indices, "edge"), (s_src, ALL), (s_dst, "dst"), (x, ALL), *((score, "edge") for score in s_edge)]
    return reads if bits is None else None


OVER_SEGMENTS = {
    _JOESTAR.spmm.default: _spmm,
    _JOESTAR.sddmm.default: lambda v, e: [(v.args[1], "edge"), (v.args[2], ALL), (v.args[3], "dst")],
    _JOESTAR.edge_softmax.default: lambda v, e: [(v.args[1], "edge")],
    _JOESTAR.edge_dst.default: lambda v, e: [],
    _JOESTAR.attend.default: _attend,
    _JOESTAR.segment.default: _segment,
}
"""Operations over the in-edges of destinations -> (operand, how it is read) of what they read, offsets left out."""


def tensors_of(arguments) -> list:
    """Every value within nested arguments that is no plain number, in order."""
    found = []
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            found += tensors_of(argument)
        elif argument is not None and hasattr(argument, "space"):
            found.append(argument)
    return found


def is_view(target) -> bool:
    """Whether a result shares memory with its first operand."""
    if not isinstance(target, OpOverload) or not target._schema.returns:
        return False
    first = target._schema.returns[0]
    return first.alias_info is not None and not first.alias_info.is_write
