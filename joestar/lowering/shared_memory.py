"""Writes to memory that two inputs of a program share: what is written through one is not seen through the other."""

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
    writes = {root(node.args[0]): node for node in gm.graph.nodes if is_in_place(node)}
    for written, write in writes.items():
        for other, tensor in held.items():
            if other is not written and written in held and other.users and _overlap(held[written], tensor):
                raise CaptureError(
                    f"{origin} writes to {written.name}, whose memory is also that of {other.name}, at "
                    f"{node_line(write)}: the step would not see through one what it writes through the other. Write "
                    "instead: one buffer, of which the model takes the parts it needs (self.state[:1]) behind the "
                    "write; or give each tensor memory of its own (.clone())."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have bytes in common, or lie between one another's."""
    if one.device != other.device or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (first, last), (start, end) = map(_bytes, (one, other))
    return first < end and start < last


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Of the first entry and behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
