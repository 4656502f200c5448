"""Methods of PyG's layers that cut out edges or nodes by a mask, with sizes that are known.

As in ``joestar.pyg.substitutes``, these forms stand in for PyG's own while a model is traced. Layers over types of
edges are given the sets that the sampler made of each type (``Subgraph.tell_apart``), or are PyG's own code.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor, nn

from joestar.pyg.traced import CUT, TRACED

_CONV = "torch_geometric.nn.conv."


def _module(name: str) -> ModuleType | None:
    return sys.modules.get(_CONV + name)


def prepare(model: nn.Module) -> None:
    """Sets attributes that layers of a model set themselves whenever they are called: to what they set."""
    rgcn = _module("rgcn_conv")
    for module in model.modules() if rgcn else ():
        if isinstance(module, rgcn.FastRGCNConv):
            module.fuse = False


def relations_of(model: nn.Module, graph, arguments) -> tuple[str, int] | None:
    """The edge data by which layers of a model tell edges apart, and how many types they know; ``None`` without such.

    Args:
        arguments: what the model is called with (``call.arguments_of``). The types are its only edge data of integers
            ``[num_edges]``, or those called ``edge_type``.
    """
    rgcn = _module("rgcn_conv")
    if rgcn is None:
        return None
    kinds = [m for m in model.modules() if isinstance(m, rgcn.RGCNConv) and not isinstance(m, rgcn.FastRGCNConv)]
    names = [name for name, kind in arguments if kind == "edge" and _numbers(graph.edata[name])]
    names = ["edge_type"] if "edge_type" in names else names
    if not kinds or len(names) != 1:
        return None
    return names[0], max(layer.num_relations for layer in kinds)


def _numbers(values: Tensor) -> bool:
    return values.dim() == 1 and not (values.dtype.is_floating_point or values.dtype.is_complex)


def functions() -> list[tuple[ModuleType, dict[str, object]]]:
    """(module, name -> stand-in) of functions that loaded modules may have under a name of their own."""
    rgcn = _module("rgcn_conv")
    return [] if rgcn is None else [(rgcn, {"masked_edge_index": _masked_edge_index(rgcn.masked_edge_index)})]


def attributes() -> list[tuple[object, str, object]]:
    """(class or module, name, stand-in)."""
    found, rgcn = [], _module("rgcn_conv")
    if rgcn is not None:
        found.append((rgcn.RGCNConv, "forward", _over_types(rgcn.RGCNConv.forward)))
        backend = sys.modules["torch_geometric.backend"]
        if backend.use_segment_matmul is None:  # to decide, PyG counts edges; compiled code takes no other way
            found.append((backend, "use_segment_matmul", False))
    return found


# --- types of edges ---


def _over_types(own):
    def forward(self, x, edge_index, edge_type=None):
        if not torch.compiler.is_compiling() or not TRACED.has_types(edge_index, edge_type):
            return own(self, x, edge_index, edge_type)
        TRACED.relation = 0
        out = own(self, x, edge_index, edge_type)
        TRACED.relation = None
        return out

    return forward


def _masked_edge_index(own):
    def masked_edge_index(edge_index, edge_mask):
        if not torch.compiler.is_compiling() or TRACED.relation is None:
            return own(edge_index, edge_mask)
        number, edges = TRACED.relation, TRACED.of_types()
        if number >= len(edges) or not TRACED.holds(edge_index, TRACED.edges):
            return own(edge_index, edge_mask)
        TRACED.relation = number + 1
        torch.ops.joestar.expect(edge_mask, TRACED.subgraph.types == number, CUT)
        return edges[number].edge_index

    return masked_edge_index
