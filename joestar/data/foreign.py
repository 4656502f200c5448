"""Objects of other libraries given to ``joestar.load``, told apart by what they have."""

import numpy as np
import torch

from joestar.data.parts import Options, apply_rules, drawn_split
from joestar.data.splits import PARTS, check_choice
from joestar.errors import DataError
from joestar.graph_api import Graph


def from_object(thing, options: Options) -> Graph:
    """A graph from one of PyG, DGL, NetworkX or SciPy; a ``Graph`` stays what it is.

    Raises:
        DataError: it is none of these, with the function to call. GraphError: it is, and is malformed.
    """
    if isinstance(thing, Graph):
        graph = thing
    elif _is_pyg(thing):
        column = options.split if isinstance(options.split, int) else None
        graph = Graph.from_pyg(thing, split=column)
    elif hasattr(thing, "is_directed") and hasattr(thing, "nodes") and hasattr(thing, "adj"):
        graph = Graph.from_networkx(thing)
    elif hasattr(thing, "tocoo") and hasattr(thing, "shape"):
        graph = Graph.from_scipy(thing)
    elif hasattr(thing, "ndata") and hasattr(thing, "num_nodes") and callable(getattr(thing, "edges", None)):
        graph = Graph.from_dgl(thing)
    else:
        raise DataError(_what_to_do(thing))
    return apply_rules(_split(graph, options), options, type(thing).__name__)


def _is_pyg(thing) -> bool:
    data = hasattr(thing, "edge_index") or hasattr(thing, "adj_t") or hasattr(thing, "edge_types")
    return data or (hasattr(thing, "num_node_features") and hasattr(thing, "num_classes"))


def _what_to_do(thing) -> str:
    name = type(thing).__name__
    if isinstance(thing, (np.ndarray, torch.Tensor, list, tuple)):
        return (
            f"joestar.load takes a name, a path or a graph; got {name}. For edges [2, E] call "
            "joestar.Graph.from_edge_index(edges, num_nodes, ndata={'x': ..., 'y': ...}), for columns of ids of any "
            "kind joestar.data.from_tables({'source': ..., 'target': ...})."
        )
    return (
        f"joestar.load takes a name, a path, PyG's Data, a NetworkX, DGL or SciPy graph or a data frame of edges; got "
        f"{name}. Build the graph with joestar.Graph.from_edge_index or joestar.data.from_tables."
    )


def _split(graph: Graph, options: Options) -> Graph:
    """A random split, where the graph has none, or another was asked for."""
    split = options.split
    if split is None or isinstance(split, int):
        return graph
    check_choice(split)
    y, own = graph.ndata.get("y"), any(getattr(graph, f"{part}_idx") is not None for part in PARTS)
    if split in ("auto", "official") and (y is None or own):
        return graph
    if split == "official":
        raise DataError("the graph has no split of its own. Use split='random', which is 60/20/20 by the seed.")
    if split == "auto" and (y.dim() > 2 or y.shape[0] != graph.num_nodes):
        return graph
    made = graph._describe(Graph(graph.indptr, graph.indices, graph.ndata, graph.edata))
    for part, ids in drawn_split(graph, options).items():
        setattr(made, f"{part}_idx", ids)
    return made
