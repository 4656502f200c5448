"""Splits of other libraries' graphs: a mask of the nodes, several beside each other, or ids."""

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import is_mask, to_ids, to_tensor
from joestar.graph_api.validate import check_ids


def ids_of_split(value, num_nodes: int, name: str, column: int | None = None) -> Tensor:
    """Node ids, int64 or int32 ``[n]``, of what an attribute such as ``train_mask`` holds.

    Args:
        value: a mask, bool or 0 and 1 ``[num_nodes]``; masks ``[num_nodes, S]`` of several splits; or ids, integers
            ``[n]``. Tensor, array or list; an empty one, of any dtype, names no node.
        name: how messages call it; column: which of several splits.

    Raises:
        GraphError: it is none of these, ids are no nodes or stand there twice, or no column was chosen.
    """
    value = to_tensor(value, name)
    if value.shape == (0,):
        return torch.empty(0, dtype=torch.int64, device=value.device)
    if value.dim() == 2 and value.shape[0] == num_nodes and is_mask(value):
        value = value[:, _column(value, name, column)]
    if value.shape == (num_nodes,) and is_mask(value):
        return torch.nonzero(value).flatten()
    if value.dim() != 1 or value.dtype == torch.bool or value.dtype.is_floating_point or value.dtype.is_complex:
        dtype = str(value.dtype).removeprefix("torch.")
        raise GraphError(
            f"{name} is {dtype} {list(value.shape)}: for {num_nodes} nodes it must be a mask, bool (or 0 and 1) "
            f"[{num_nodes}], masks of S splits [{num_nodes}, S], or ids of nodes (integers)."
        )
    ids = to_ids(value, name)
    check_ids(ids, num_nodes, name)
    again = torch.nonzero(torch.bincount(ids, minlength=num_nodes) > 1).flatten()
    if again.numel():
        raise GraphError(
            f"{name} holds no mask (0 and 1, one per node), and as ids names node {int(again[0])} more than once: give "
            f"a mask, bool [{num_nodes}], or every id once."
        )
    return ids


def _column(mask: Tensor, name: str, column: int | None) -> int:
    count = mask.shape[1]
    if column is None and count == 1:
        return 0
    if count == 0:
        raise GraphError(f"{name} is {list(mask.shape)}: no split of the nodes. Give a mask, bool [{mask.shape[0]}].")
    if column is None:
        raise GraphError(
            f"{name} is {list(mask.shape)}: {count} splits of the nodes. Choose one: "
            f"Graph.from_pyg(data, split=0), up to {count - 1}."
        )
    if isinstance(column, bool) or not isinstance(column, int) or not 0 <= column < count:
        raise GraphError(f"split must be in 0..{count - 1}, as {name} is {list(mask.shape)}; got {column!r}.")
    return column
