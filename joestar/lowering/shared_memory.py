"""Writes to memory that two inputs of a program share: what is written through one is not seen through the other."""

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.inputs import Input
from joestar.lowering.origin import node_line


def check_shared_memory(gm: fx.GraphModule, roles: list[Input], origin: str) -> None:
    """Raises ``CaptureError`` if a program writes to a tensor whose memory another of its inputs reads or writes.

    Programs know tensors, not memory: padded, a write ends the step, and nobody else reads it before.
    """
    held = {node: role.tensor for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True)}
    held = {node: tensor for node, tensor in held.items() if isinstance(tensor, Tensor) and tensor.numel()}
    writes = {root(value): node for node in gm.graph.nodes for value in _written(node)}
    for written, write in writes.items():
        for other, tensor in held.items():
            if other is not written and written in held and other.users and _overlap(held[written], tensor):
                raise CaptureError(
                    f"{origin} writes to {written.name}, whose memory is also that of {other.name}, at "
                    f"{node_line(write)}: the step would not see through one what it writes through the other. Write "
                    "instead: one buffer, of which the model takes the parts it needs (self.state[:1]) behind the "
                    "write; or give each tensor memory of its own (.clone())."
                )


def _written(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a node writes to: running statistics of a norm that trains, too, of which its schema does not say so."""
    if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
        return tuple(value for value in node.args[3:5] if value is not None)
    return (node.args[0],) if is_in_place(node) else ()


_ENTRIES = 1 << 22
"""Of a storage whose entries are looked at one by one."""


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have entries in common; in large storages, whether one lies between the other's."""
    storage = one.untyped_storage()
    if one.device != other.device or storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (start, end) = map(_bytes, (one, other))
    if first >= end or start >= last:
        return False
    if one.dtype != other.dtype or storage.nbytes() > _ENTRIES * one.element_size():
        return True
    touched = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    touched.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(touched.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Of the first entry and behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
