"""Which operations look up, write, move or map rows: tables for ``lowering.slots``."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joestar.torch_private import OpOverload

_ATEN, _OPS = torch.ops.aten, torch.ops.joestar
_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Messages:
    """Places of arguments: rows of the sources; the number of rows that come out, where these are the sources'."""

    sources: int | None = None
    size: int | None = None


MESSAGES = {
    _OPS.spmm.default: Messages(sources=2), _OPS.sddmm.default: Messages(sources=2),
    _OPS.spmm_csr.default: Messages(size=4), _OPS.out_degrees.default: Messages(size=2),
}  # fmt: skip
"""Message passing over (indptr, indices, ...)."""

_CASTS = {_ATEN.to, _ATEN._to_copy, _ATEN.type_as}
_COPIES = {_ATEN.clone, _ATEN.alias, _ATEN.detach, _ATEN.contiguous, _ATEN.lift_fresh_copy}
_SHAPES = {
    _ATEN.view, _ATEN.reshape, _ATEN._unsafe_view, _ATEN.slice, _ATEN.select, _ATEN.unsqueeze, _ATEN.squeeze,
    _ATEN.expand, _ATEN.flatten, _ATEN.unflatten, _ATEN.permute, _ATEN.transpose, _ATEN.t, _ATEN.flip, _ATEN.roll,
    _ATEN.narrow, _ATEN.repeat, _ATEN.repeat_interleave, _ATEN.split, _ATEN.split_with_sizes, _ATEN.chunk,
    _ATEN.unbind,
}  # fmt: skip
_JOINS = {_ATEN.cat, _ATEN.stack, _ATEN.concat}


def packet(node: fx.Node):
    """The operation of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def _argument(node: fx.Node, place: int, name: str, default=None):
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _dims(value: Tensor) -> int:
    return max(1, value.dim())


# --- ids ---


def moves(node: fx.Node) -> bool:
    """Whether the op gives entries of its first argument as they are."""
    if packet(node) in _CASTS:
        return node.meta["val"].dtype in _IDS
    if node.target is _ATEN.repeat_interleave.Tensor:  # its first argument says how often
        return False
    return packet(node) in _COPIES or packet(node) in _SHAPES


def joins(node: fx.Node) -> bool:
    """Whether the op gives entries of several arguments as they are."""
    return packet(node) in _JOINS or node.target is _ATEN.where.self


def joined(node: fx.Node) -> list:
    """Those arguments."""
    return list(node.args[1:]) if node.target is _ATEN.where.self else list(node.args[0])


def numbers(node: fx.Node) -> list[float]:
    """Numbers among the arguments of an op that are values, not sizes, dimensions or places."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return []
    found = []
    for place, argument in enumerate(node.target._schema.arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if type(value) in (int, float) and kind in ("Tensor", "number", "Scalar", "float"):
            found.append(value)
    return found


FILLED = {_ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like, _ATEN.empty_like}
"""As many rows as the argument, all alike."""
_LIKE = FILLED | {_ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full, _ATEN.new_empty}


def read_but_for_its_values(node: fx.Node) -> object:
    """The argument of which an op takes dtype, device or sizes only, else ``None``."""
    if packet(node) in _LIKE:
        return node.args[0]
    return node.args[1] if node.target in (_ATEN.type_as.default, _ATEN.to.other) else None


# --- by index ---


def index_read(node: fx.Node) -> tuple[object, int, list] | None:
    """(table, dimension, indices) of an op that looks rows up, else ``None``."""
    kind = packet(node)
    if kind is _ATEN.embedding:
        return node.args[0], 0, [node.args[1]]
    if kind in (_ATEN.index_select, _ATEN.gather):
        dim = node.args[1] % _dims(node.args[0].meta["val"])
        return node.args[0], dim, [node.args[2]]
    if kind is _ATEN.index:
        return _by_list(node)
    if node.target is _OPS.gather_rows.default:
        return node.args[0], 0, [node.args[3]]
    return None


def _by_list(node: fx.Node) -> tuple[object, int, list]:
    indices = list(node.args[1])
    dim = next((place for place, index in enumerate(indices) if index is not None), 0)
    return node.args[0], dim, [index for index in indices if index is not None]


_WRITES = {
    _ATEN.index_add, _ATEN.index_add_, _ATEN.index_copy, _ATEN.index_copy_, _ATEN.index_fill, _ATEN.index_fill_,
    _ATEN.index_reduce, _ATEN.index_reduce_, _ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_,
    _ATEN.scatter_reduce, _ATEN.scatter_reduce_,
}  # fmt: skip


def index_write(node: fx.Node) -> tuple[object, int, list, list] | None:
    """(table, dimension, indices, other arguments) of an op that writes rows, else ``None``."""
    kind = packet(node)
    if kind in (_ATEN.index_put, _ATEN.index_put_):
        return *_by_list(node), list(node.args[2:])
    if kind in _WRITES:
        dim = node.args[1] % _dims(node.args[0].meta["val"])
        return node.args[0], dim, [node.args[2]], list(node.args[3:])
    return None


# --- row by row ---


def row_by_row(node: fx.Node, tables: set[fx.Node]) -> bool:
    """Whether row ``i`` of the result is made of row ``i`` of the tables, for all rows alike."""
    value, kind = node.meta.get("val"), packet(node)
    rows = next(iter(tables)).meta["val"].shape[0]
    if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != rows or node.target._schema.is_mutable:
        return False
    if kind in _CASTS or kind in _COPIES or kind in FILLED:
        return True
    if kind in _ROW_RULES:
        return _ROW_RULES[kind](node, tables)
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return torch.Tag.pointwise in tags and not random and _aligned(node, tables, value)


def _aligned(node: fx.Node, tables: set[fx.Node], value: Tensor) -> bool:
    """Whether the tables' rows are the result's rows, and what else there is is the same for all of them."""
    for argument in node.all_input_nodes:
        own = argument.meta.get("val")
        if not isinstance(own, Tensor):
            continue
        if argument in tables:
            if own.dim() != value.dim():
                return False
        elif own.dim() == value.dim() and own.shape[0] != 1:
            return False
    return True


def _first(node: fx.Node, tables: set[fx.Node]) -> bool:
    """Whether the first argument is the only table."""
    return tables == {node.args[0]}


def _not_first_dim(place: int, name: str = "dim", default=None):
    """Dimensions, at a place among the arguments, without the first one."""

    def rule(node: fx.Node, tables: set[fx.Node]) -> bool:
        dims = _argument(node, place, name, default)
        if not _first(node, tables) or dims is None:
            return False
        own, length = dims if isinstance(dims, (list, tuple)) else [dims], node.args[0].meta["val"].dim()
        return bool(own) and all(dim % length != 0 for dim in own)

    return rule


def _unsqueezed(node: fx.Node, tables: set[fx.Node]) -> bool:
    return node.args[1] % node.meta["val"].dim() != 0


def _sliced(node: fx.Node, tables: set[fx.Node]) -> bool:
    """Other dimensions; of the first one everything."""
    dim, start = _argument(node, 1, "dim", 0), _argument(node, 2, "start")
    end, step = _argument(node, 3, "end"), _argument(node, 4, "step", 1)
    value = node.args[0].meta["val"]
    return dim % value.dim() != 0 or (start in (None, 0) and step == 1 and (end is None or end >= value.shape[0]))


def _same_dims(node: fx.Node, tables: set[fx.Node]) -> bool:
    return node.meta["val"].dim() == node.args[0].meta["val"].dim()


def _permuted(node: fx.Node, tables: set[fx.Node]) -> bool:
    return node.args[1][0] == 0


def _transposed(node: fx.Node, tables: set[fx.Node]) -> bool:
    return all(dim % node.meta["val"].dim() != 0 for dim in node.args[1:3])


def _joined_columns(node: fx.Node, tables: set[fx.Node]) -> bool:
    dim = _argument(node, 1, "dim", 0)
    return dim % node.meta["val"].dim() != 0 and all(part in tables for part in node.args[0])


def _normalised(node: fx.Node, tables: set[fx.Node]) -> bool:
    return _first(node, tables) and len(node.args[1]) < node.args[0].meta["val"].dim()


def _multiplied(node: fx.Node, tables: set[fx.Node]) -> bool:
    return _first(node, tables) and node.args[0].meta["val"].dim() >= 2 and node.args[1].meta["val"].dim() <= 2


def _mapped(node: fx.Node, tables: set[fx.Node]) -> bool:
    return _first(node, tables) and node.args[0].meta["val"].dim() >= 2


_EACH = _first
_ROW_RULES = {
    _ATEN.view: _EACH, _ATEN.reshape: _EACH, _ATEN._unsafe_view: _EACH, _ATEN.flatten: _EACH, _ATEN.unflatten: _EACH,
    _ATEN.squeeze: _EACH, _ATEN.one_hot: _EACH, _ATEN.unsqueeze: _unsqueezed, _ATEN.slice: _sliced,
    _ATEN.select: _not_first_dim(1), _ATEN.narrow: _not_first_dim(1), _ATEN.expand: _same_dims,
    _ATEN.expand_as: _same_dims,
    _ATEN.permute: _permuted, _ATEN.transpose: _transposed, _ATEN.flip: _not_first_dim(1, "dims"),
    _ATEN.cat: _joined_columns, _ATEN.concat: _joined_columns, _ATEN.stack: _joined_columns,
    _ATEN.linear: _mapped, _ATEN.matmul: _multiplied, _ATEN.mm: _multiplied,
    _ATEN.sum: _not_first_dim(1), _ATEN.mean: _not_first_dim(1), _ATEN.amax: _not_first_dim(1),
    _ATEN.amin: _not_first_dim(1), _ATEN.argmax: _not_first_dim(1), _ATEN.argmin: _not_first_dim(1),
    _ATEN.any: _not_first_dim(1), _ATEN.all: _not_first_dim(1), _ATEN.cumsum: _not_first_dim(1),
    _ATEN.logsumexp: _not_first_dim(1), _ATEN.softmax: _not_first_dim(1), _ATEN._softmax: _not_first_dim(1),
    _ATEN.log_softmax: _not_first_dim(1), _ATEN._log_softmax: _not_first_dim(1), _ATEN.std: _not_first_dim(1),
    _ATEN.var: _not_first_dim(1), _ATEN.norm: _not_first_dim(2), _ATEN.linalg_vector_norm: _not_first_dim(2),
    _ATEN.layer_norm: _normalised, _ATEN.native_layer_norm: _normalised, _ATEN.rms_norm: _normalised,
}  # fmt: skip
"""Ops that are not pointwise -> whether they keep rows apart, given the node and which of its arguments are tables."""
