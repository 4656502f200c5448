"""Joined weights are converted to the dtype of autocast as they are joined, their gradients as they are split (GPU).

Before                                              After
    ws = join_columns_all([a, b, c], [2, 1], ..)        ws = join_columns_all([a, b, c, d], [2, 1, 1], .., "bfloat16")
    w  = convert_element_type(ws[0], bfloat16)          w  = ws[0]
    v  = convert_element_type(ws[1], bfloat16)          v  = ws[1]
    b  = convert_element_type(d, bfloat16)              b  = reshape(ws[2], [n])        d: a bias, [n]

    e  = convert_element_type(dw, float32)              gs = split_columns_all([dw, dv], [2, 1], .., "float32")
    f  = convert_element_type(dv, float32)
    gs = split_columns_all([e, f], [2, 1], ..)

A launch for each of the weights in front of the products, and one behind, are saved: launches are what such small
tensors cost. On a graph of Inductor's, in front of its own rewrites.

Must not fire when one of the joined weights is read unconverted, or in another dtype than the others, nor when one of
the gradients is no conversion, or one with another reader. Biases stay that are converted in front of the joint, or are
too many for its launch.
"""

import operator
from collections.abc import Iterator

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor

NAME = "join-casts"
_CONVERT, _RESHAPE = torch.ops.prims.convert_element_type.default, torch.ops.aten.reshape.default
_JOESTAR = torch.ops.joestar
_TENSORS, _LONGEST = 32, 2**14
"""Of one launch (``kernels/gpu_join.py``); numbers of a bias."""


def run(graph: fx.Graph) -> int:
    """Rewrites every joint that fits; returns how many."""
    joints = list(graph.find_nodes(op="call_function", target=_JOESTAR.join_columns_all.default))
    splits = list(graph.find_nodes(op="call_function", target=_JOESTAR.split_columns_all.default))
    return sum(map(_join, joints)) + sum(map(_split, splits))


def _on_gpu(node: fx.Node) -> bool:
    value = tensor(node)
    return value is not None and value.device.type == "cuda"


def _join(node: fx.Node) -> bool:
    """Whether the weights of a joint are made in the dtype that their readers convert them to."""
    items = list(node.users)
    if len(node.args) != 3 or not all(item.target is operator.getitem and _on_gpu(item) for item in items):
        return False
    readers = [reader for item in items for reader in item.users]
    if not readers or any(reader.target is not _CONVERT for reader in readers):
        return False
    dtypes = {reader.args[1] for reader in readers}
    if len(dtypes) != 1:
        return False
    (dtype,) = dtypes
    node.args = (*node.args, _name(dtype))
    node.meta = {**origin(node), "val": [value.new_empty(value.shape, dtype=dtype) for value in node.meta["val"]]}
    for item in items:
        item.meta = {**item.meta, "val": node.meta["val"][item.args[1]]}
        for reader in list(item.users):
            reader.replace_all_uses_with(item)
            item.graph.erase_node(reader)
    _take_biases(node, dtype)
    return True


def _take_biases(node: fx.Node, dtype: torch.dtype) -> None:
    """Vectors that are converted to the same dtype behind a joint are converted by it, as matrices of one column."""
    parts, counts, widths, name = node.args
    room = (_TENSORS - len(parts) - len(counts)) // 2
    casts = [cast for cast in _behind(node) if _is_bias(cast, dtype)][: max(0, room)]
    if not casts:
        return
    vectors, made = [cast.args[0] for cast in casts], [cast.meta["val"] for cast in casts]
    node.args = ([*parts, *vectors], [*counts, *[1] * len(casts)], [*widths, *[1] * len(casts)], name)
    node.meta = {**origin(node), "val": [*node.meta["val"], *(value.new_empty((value.shape[0], 1)) for value in made)]}
    for i, cast in enumerate(casts, len(counts)):
        with node.graph.inserting_before(cast):
            column = node.graph.call_function(operator.getitem, (node, i))
            vector = node.graph.call_function(_RESHAPE, (column, [cast.meta["val"].shape[0]]))
        column.meta, vector.meta = {**origin(cast), "val": node.meta["val"][i]}, cast.meta
        cast.replace_all_uses_with(vector)
        node.graph.erase_node(cast)


def _behind(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes behind one."""
    while node.next.op != "root":
        node = node.next
        yield node


def _is_bias(cast: fx.Node, dtype: torch.dtype) -> bool:
    if cast.target is not _CONVERT or cast.args[1] != dtype or cast.args[0].op != "placeholder":
        return False
    value = tensor(cast.args[0])
    return (
        _on_gpu(cast) and value.dtype.is_floating_point and value.dim() == 1 and 0 < value.numel() <= _LONGEST
        and value.is_contiguous()
    )  # fmt: skip


def _split(node: fx.Node) -> bool:
    """Whether gradients are split as they are, and converted on the way."""
    casts = node.args[0]
    if len(node.args) != 3 or not all(
        cast.target is _CONVERT and len(cast.users) == 1 and _on_gpu(cast) for cast in casts
    ):
        return False
    dtypes, graph = {cast.args[1] for cast in casts}, node.graph
    if len(dtypes) != 1 or len(set(casts)) != len(casts):
        return False
    with graph.inserting_before(node):
        args = ([cast.args[0] for cast in casts], *node.args[1:], _name(*dtypes))
        new = graph.call_function(node.target, args)
    new.meta = {**origin(node), "val": node.meta["val"]}
    node.replace_all_uses_with(new)
    for old in (node, *casts):
        graph.erase_node(old)
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
