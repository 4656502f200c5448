"""Which models take an ``edge_index``, and how they are called with a subgraph."""

import inspect
import re

import torch
from torch import Tensor, fx, nn

from joestar.errors import ConfigError
from joestar.graph_api.subgraph import Subgraph
from joestar.pyg.traced import TRACED
from joestar.torch_private import statically_known_true

_HOOKS = re.compile(r"_(propagate|message|aggregate|message_and_aggregate|edge_update)_forward_(pre_)?hooks")
_SPARSE = ("adj", "adj_t")
_EMPTY = inspect.Parameter.empty
_ANY = 1 << 62
"""No fixed size is beyond it; of the size of a sampled set, a symbol while traced, that is not known."""


def takes_edge_index(model) -> bool:
    """Whether a module's ``forward`` has a parameter ``edge_index`` and none for blocks.

    Raises:
        ConfigError: for one that takes an adjacency matrix or a ``Data`` object in its place.
    """
    if not isinstance(model, nn.Module):
        return False
    parameters = _parameters(model)
    name = type(model).__name__
    if "blocks" in parameters or "block" in parameters:
        return False
    if _typed(model, parameters):
        raise ConfigError(
            f"{name} takes several types of nodes or edges (x_dict, HeteroConv, to_hetero), and a graph has one: "
            "data.to_homogeneous() keeps the types as tensors, graph.ndata['node_type'] and graph.edata['edge_type'], "
            "which a model may take as parameters."
        )
    if "edge_index" in parameters:
        return True
    if len(parameters) > 1 and list(parameters)[1] in _SPARSE and _of_pyg(model):
        raise ConfigError(
            f"{name}.forward takes {list(parameters)[1]}, a sparse matrix, which sampled batches have not: write "
            "forward(self, x, edge_index), which layers of PyG take as well; weights come in as a parameter "
            "edge_weight, from graph.edata['edge_weight']."
        )
    if list(parameters) in (["data"], ["batch"]) and _of_pyg(model):
        (given,) = parameters
        raise ConfigError(
            f"{name}.forward takes a Data object: write forward(self, x, edge_index) in place of forward(self, "
            f"{given}); parameters edge_weight, edge_attr, edge_type come from graph.edata under their names."
        )
    return False


def _typed(model: nn.Module, parameters) -> bool:
    """Whether a model is called with dicts by type of node or edge, or was made so by ``to_hetero``."""
    if "x_dict" in parameters or "edge_index_dict" in parameters:
        return True
    return isinstance(model, fx.GraphModule) and any(
        isinstance(module, nn.ModuleDict) and _of_pyg(module) for module in model.modules()
    )


_CUTS = (
    "batch_size",
    "num_sampled_nodes_per_hop",
    "num_sampled_edges_per_hop",
    "num_sampled_nodes",
    "num_sampled_edges",
)
"""What a ``NeighborLoader`` hands over, with which models cut its batches."""


def _of_pyg(model: nn.Module) -> bool:
    return any(type(module).__module__.startswith("torch_geometric") for module in model.modules())


def _parameters(model: nn.Module) -> dict[str, object]:
    """Names of the parameters of ``forward``, in order, with their defaults (``inspect.Parameter.empty``: none)."""
    signature = getattr(model, "signature", None)  # torch_geometric.nn.Sequential, whose forward is (*args, **kwargs)
    if hasattr(signature, "param_dict"):
        return dict.fromkeys(signature.param_dict, _EMPTY)
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter.default for parameter in found if parameter.kind in named}


def _positional_only(model: nn.Module) -> list[str]:
    """Names of parameters of ``forward`` in front of ``/``."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in found if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]


def check_hooks(model: nn.Module) -> None:
    """Raises ``ConfigError`` for layers with hooks of ``MessagePassing``, or explained: PyG skips them in a trace."""
    for name, module in model.named_modules():
        held = {key for key, value in vars(module).items() if _HOOKS.fullmatch(key) and value}
        if held or getattr(module, "_explain", None):
            what = ", ".join(sorted(key.strip("_") for key in held)) or "explain=True"
            raise ConfigError(
                f"{type(model).__name__}.{name} has {what}: PyG leaves these out of what is compiled. Write "
                "what the hook does into message, aggregate or update of a subclass, or around the call of the layer."
            )


def arguments_of(model: nn.Module, graph) -> list[tuple[str, str]]:
    """What ``forward`` is called with, in order: pairs of the parameter's name and where it comes from.

    That is ``x`` (features: the parameter of this name, else the first one without default that is neither
    ``edge_index``, nor data of edges by its name, nor named as a tensor of the graph), ``edges``, ``edge`` or ``node``
    (the tensor of that name in ``graph.edata``, else in ``graph.ndata``). Parameters with a default are given only edge
    data, and features, if they are called ``x``, the graph has some, and no other parameter needs them.

    Raises:
        ConfigError: ``forward`` needs a tensor that the graph has not.
    """
    found, parameters = [], _parameters(model)
    first = next((name for name, default in parameters.items() if default is _EMPTY and _may_be_x(name, graph)), None)
    named = "x" in parameters and (parameters["x"] is _EMPTY or ("x" in graph.ndata and first is None))
    for name, default in parameters.items():
        if name == "edge_index":
            found.append((name, "edges"))
        elif named and name == "x":
            found.append((name, "x"))
        elif name in graph.edata and name != "x":
            found.append((name, "edge"))
        elif default is _EMPTY and name in graph.ndata:
            found.append((name, "node"))
        elif name == first and not named:
            found.append((name, "x"))
        elif default is _EMPTY and name in _CUTS:
            raise ConfigError(
                f"{type(model).__name__}.forward takes {name}: Joestar trims layers to what is needed, and cuts the "
                f"result to the seeds, by itself. Leave it out of forward, or give it a default ({name}=None) and take "
                "all rows."
            )
        elif default is _EMPTY:
            raise ConfigError(
                f"{type(model).__name__}.forward takes {name}, and the graph has no such tensor: set "
                f"graph.edata[{name!r}] ([num_edges, ...]) or graph.ndata[{name!r}] ([num_nodes, ...]), or give the "
                f"parameter a default ({name}=None); where a sampler sets it in its blocks, it gets that."
            )
    return found


def _may_be_x(name: str, graph) -> bool:
    """Whether a parameter without default may be the features, by its name: no data of edges or of the graph's."""
    return not (name.startswith("edge_") or name in _CUTS or name in graph.edata or name in graph.ndata)


def call_on_subgraph(model: nn.Module, subgraph: Subgraph, x: Tensor | None):
    """``model(x, edge_index, ...)`` on all nodes of a subgraph; of every tensor it returns, the rows of the seeds.

    While traced, tensors of a fixed size are returned as they are; rows of edges are an error where they are cut.

    Args:
        x: features of the nodes ``[num_nodes, F]``.
    """
    edges = subgraph.edges()
    traced = torch.compiler.is_compiling()
    if traced:
        TRACED.begin(edges, subgraph)
    given = {}
    for name, kind in subgraph.arguments:
        if kind == "edges":
            given[name] = edges.edge_index
        elif kind == "x":
            given[name] = subgraph.srcdata["x"] if "x" in subgraph.srcdata.own else x
        else:
            given[name] = (subgraph.edata if kind == "edge" else subgraph.srcdata)[name]
    if subgraph.edata.own or subgraph.srcdata.own:
        given |= _of_sampler(model, subgraph)
    positional = [given.pop(name) for name in _positional_only(model) if name in given]
    outputs = model(*positional, **given)
    if traced:
        TRACED.begin(None, None)  # what outlived the call would be an output of the program
    elif subgraph.num_seeds == subgraph.num_src:
        return outputs
    return _of_seeds(outputs, subgraph.num_seeds)


def _of_sampler(model: nn.Module, subgraph: Subgraph) -> dict[str, Tensor]:
    """What the sampler has set in the blocks' ``edata`` and ``srcdata`` under names of parameters of ``forward``."""
    found = {}
    for name in _parameters(model):
        for frame in (subgraph.edata, subgraph.srcdata):
            if name in frame.own and name not in found and name not in ("x", "edge_index"):
                found[name] = frame[name]
    return found


def _of_seeds(value, num_seeds):
    if isinstance(value, Tensor):
        return value[:num_seeds] if value.dim() and not is_fixed(value.shape[0]) else value
    if isinstance(value, dict):
        return {key: _of_seeds(part, num_seeds) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_of_seeds(part, num_seeds) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def is_fixed(rows) -> bool:
    """Whether a size is the same in every batch; outside of a trace that cannot be told."""
    return torch.compiler.is_compiling() and statically_known_true(rows < _ANY)
