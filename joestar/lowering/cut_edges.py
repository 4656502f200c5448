"""Edges that PyG's layers cut out by a mask are those of the set that stands in for them, or an error.

The sampler tells edges apart by their type (``Subgraph.tell_apart``), and a layer over types is given these sets one
after the other (``joestar.pyg.layers``), with a note of the mask that it came with. Whether that is the mask of the set
is read off the traced code.
"""

import torch
from torch import fx

from joestar.errors import CaptureError
from joestar.graph_api import subgraph
from joestar.lowering.assumptions import ASSIGNED_IN_PLACE
from joestar.lowering.origin import node_frames, node_line
from joestar.pyg.traced import CUT


def check_cuts(gm: fx.GraphModule, origin: str) -> None:
    """Raises ``CaptureError`` where a mask of edges is another one than that of the set, in TorchDynamo's graph.

    And where the model writes into the ``edge_index`` that it is given: sets of edges are made of the sample.
    """
    for node in gm.graph.nodes:
        if node.target is torch.stack and _is_written(node) and _made_by_us(node):
            raise CaptureError(
                f"{origin} writes into edge_index in place at {node_line(_writer(node))}. Sets of edges that "
                "layers ask for (with loops, without, by type) are those of the sample.\n  Write instead: a new "
                "tensor (edge_index = torch.stack([src, dst]))."
            )
        if node.op != "call_function" or node.target not in _NOTES or node.args[2] != CUT:
            continue
        mask, of_set = node.args[:2]
        if not _same(mask, of_set) or any(map(_is_written, of_set.args)):
            raise CaptureError(
                f"{origin}: edges are cut out by a mask at {node_line(node)} that is not edge_type == i, for i from 0 "
                "on. How many those are depends on data.\n  Write instead: leave all edges in, and torch.where(mask, "
                "values, 0) for what is added up of them."
            )


_SUBGRAPH = subgraph.__file__
_NOTES = (torch.ops.joestar.expect, torch.ops.joestar.expect.default)


def _made_by_us(node: fx.Node) -> bool:
    frames = node_frames(node)
    return bool(frames) and frames[-1][0] == _SUBGRAPH


def _writer(node: fx.Node) -> fx.Node:
    """The first of its readers, or of those of its rows, that may write in place; itself if none is known."""
    among = [node]
    for reader in among:
        name = reader.target if reader.op == "call_method" else getattr(reader.target, "__name__", "")
        if name.endswith("_") or name == "setitem" or reader.target in ASSIGNED_IN_PLACE:
            return reader
        among += [user for user in reader.users if user not in among]
    return node


def _is_written(value) -> bool:
    """Whether a tensor, or a view of it, was written in place: the set was made before."""
    held = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return isinstance(held, torch.Tensor) and held._version > 0


def _same(one, other) -> bool:
    """Whether two arguments in a graph are the same, or come from the same operation on the same."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other
    if one is other:
        return True
    calls = one.op == "call_function" or (one.op == "call_method" and one.target == "__eq__")  # so before PyTorch 2.13
    if not calls or (one.op, one.target) != (other.op, other.target) or one.kwargs or other.kwargs:
        return False
    return len(one.args) == len(other.args) and all(map(_same, one.args, other.args))
