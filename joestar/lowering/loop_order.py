"""Values of edges that are joined or cut by position, where loops that were added stand among the edges.

PyG appends loops behind all edges; in a batch each stands with its destination (``joestar.pyg.substitutes``). A model
that puts values beside them by position would be right in PyG and wrong here.
"""

import torch
from torch import fx

from joestar.errors import CaptureError
from joestar.lowering.causes import of_edges
from joestar.lowering.origin import is_framework, node_frames, node_line
from joestar.lowering.rules.arguments import dims
from joestar.lowering.sizes import same_shape, same_size

_ATEN, _LOOPS = torch.ops.aten, torch.ops.joestar.append_loops.default
_BY_POSITION = {
    _ATEN.cat.default, _ATEN.slice.Tensor, _ATEN.narrow.default, _ATEN.select.int, _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default, _ATEN.chunk.default, _ATEN.flip.default, _ATEN.roll.default,
    _ATEN.tensor_split.sections, _ATEN.tensor_split.indices, _ATEN.unsafe_split.Tensor,
    _ATEN.cumsum.default, _ATEN.cumprod.default, _ATEN.cummax.default, _ATEN.cummin.default, _ATEN.logcumsumexp.default,
    _ATEN.diff.default,
}  # fmt: skip
"""Ops that put rows behind one another, take some by their numbers, or add up those before each."""
_NUMBERS = {_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step, _ATEN.linspace.default}
"""Ops that number rows."""
_PADS = {_ATEN.pad.default, _ATEN.constant_pad_nd.default}
"""Ops that put rows of a number in front and behind."""


def check_order_of_loops(gm: fx.GraphModule, origin: str) -> None:
    """Raises ``CaptureError`` where one of these ops works along edges with added loops, or makes as many."""
    added = gm.graph.find_nodes(op="call_function", target=_LOOPS)
    looped = [node.meta["val"][1] for node in added]
    edges_before = [node.args[1].meta["val"] for node in added]
    for node in gm.graph.nodes if looped else ():
        if node.target not in _BY_POSITION | _PADS | _NUMBERS or _takes_all(node) or _is_ours(node):
            continue
        sizes, among = _lengths(node), looped + (edges_before if node.target in _NUMBERS else [])
        if any(same_size(size, edges.shape[0]) for size in sizes for edges in among):
            raise of_edges(node_line(node), origin) or CaptureError(
                f"{origin}: {node.target} at {node_line(node)} joins, cuts or numbers values of edges by position, and "
                "loops that add_self_loops adds do not stand behind all edges here, but with their nodes. Write "
                "instead: edge_index, values = add_self_loops(edge_index, values, fill_value, num_nodes)."
            )


def _lengths(node: fx.Node) -> list:
    """Of the dimensions along which the op works: what it has of them, or makes of them."""
    made = node.meta["val"]
    if node.target in _NUMBERS:
        return list(made.shape)
    if node.target in _PADS:
        value = node.args[0].meta["val"]
        touched = [value.dim() - 1 - number // 2 for number, width in enumerate(node.args[1]) if width != 0]
        return [tensor.shape[dim] for tensor in (value, made) for dim in touched]
    value = made if node.target is _ATEN.cat.default else node.args[0].meta["val"]
    return [value.shape[dim] for dim in dims(node, value.dim())]


def _is_ours(node: fx.Node) -> bool:
    """Whether code of Joestar's numbers edges: in their order here."""
    frames = node_frames(node)
    return node.target in _NUMBERS and bool(frames) and is_framework(frames[-1][0])


def _takes_all(node: fx.Node) -> bool:
    """Whether a slice is all there is, as the first of ``x[:, None]``."""
    return node.target is _ATEN.slice.Tensor and same_shape(node.meta["val"].shape, node.args[0].meta["val"].shape)
