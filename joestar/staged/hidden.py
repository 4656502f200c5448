"""What a model's hidden layers look like, and the sampler that lets them exchange historical embeddings."""

import copy

import torch
from torch import Tensor, nn

from joestar.errors import CaptureError, ConfigError, JoestarError
from joestar.graph_api import Graph, SamplingContext, check_blocks
from joestar.graph_api.history import HistoryTables, NotedLayer, check_layers, with_history
from joestar.locks import TRACING
from joestar.lowering import causes
from joestar.profile.sizes import step_key
from joestar.runtime.features import call_model
from joestar.stages import LargeBatch

FEW = 4
"""Seeds of the batch on which the model is looked at."""


def exchanging(sampler, graph: Graph, tables: HistoryTables):
    """The sampler over another graph, with blocks that exchange historical embeddings; of the same class, by name."""
    other = copy.copy(sampler)
    other.graph, other.history_tables = graph, tables
    own = vars(other).pop("sample", None)  # a method of this object alone
    base = type(sampler)

    class Exchanging(base):
        def sample(self, graph, seeds):
            blocks = base.sample(self, graph, seeds) if own is None else own(graph, seeds)
            check_blocks(blocks, base.__name__)
            return with_history(list(blocks), self.history_tables)

    Exchanging.__name__, Exchanging.__qualname__ = base.__name__, base.__qualname__
    other.__class__ = Exchanging
    return other


def hidden_widths(model: nn.Module, sampler, seeds: Tensor, autocast: torch.dtype | None) -> list[int]:
    """Columns of every hidden layer that ``model`` hands to ``joestar.nn.historical``, from the input side.

    The model is run once, on a copy in evaluation mode, on a batch of a few seeds.

    Raises:
        ConfigError: it has no hidden layers, or does not call ``historical`` for each of them, or with other rows.
    """
    device = next((p.device for p in model.parameters()), sampler.graph.device)
    name = type(model).__name__
    with TRACING:  # as ``profile.sizes.measure``
        graph, local = _neighbourhood(sampler, seeds[:FEW], device)
        blocks = sampler.sample(graph.with_context(SamplingContext(step_key(0, 0, 0, device))), local)
    check_blocks(blocks, type(sampler).__name__)
    if len(blocks) < 2:
        raise ConfigError(
            f"{type(sampler).__name__} makes a single block: {name} has no hidden layer whose rows could be kept. For "
            "first_stage=joestar.Partitions(...) take two layers or more, or use joestar.LargeBatch."
        )
    found: list = []
    for layer, block in enumerate(blocks[:-1]):
        block.history = NotedLayer(layer, found)
    _run(model, blocks, graph, autocast)
    check_layers([layer for layer, *_ in found], len(blocks) - 1, f"{name}.forward")
    for layer, shape, rows, dtype in found:
        if len(shape) != 2 or shape[0] != rows or not dtype.is_floating_point:
            raise ConfigError(
                f"{name}: joestar.nn.historical(h, blocks[{layer}]) needs the block's destinations, float [{rows}, C]; "
                f"got {dtype} {list(shape)}. Call it behind the layer over blocks[{layer}], heads in one dimension."
            )
    return [shape[1] for _, shape, *_ in sorted(found, key=lambda entry: entry[0])]


def _neighbourhood(sampler, seeds: Tensor, device: torch.device) -> tuple[Graph, Tensor]:
    """(a graph on the device of what a batch of seeds needs, the seeds' ids there)."""
    whole: Graph = sampler.graph
    macro = LargeBatch(seeds.numel()).sample(whole, sampler, seeds, (0, 0, 0))
    ids = macro.ids.to(torch.int64)
    ends = macro.indptr[-1:].expand(macro.num_nodes - macro.num_rows)
    ndata = {name: value[ids].to(device) for name, value in whole.ndata.items()}
    edata = {name: value[macro.eids].to(device) for name, value in whole.edata.items()}
    indices = macro.indices.to(whole.indices.dtype)
    graph = Graph(torch.cat([macro.indptr, ends]).to(device), indices.to(device), ndata, edata)
    degrees = whole.indptr[ids + 1] - whole.indptr[ids] if whole.whole_degrees is None else whole.whole_degrees[ids]
    graph.ids, graph.whole_degrees = macro.ids.to(device), degrees.to(device)
    graph.num_classes, graph.multilabel = whole.num_classes, whole.multilabel
    return graph, macro.seeds.to(device, whole.indices.dtype)


def _run(model: nn.Module, blocks: list, graph: Graph, autocast: torch.dtype | None) -> None:
    try:
        model = copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be copied, to find the widths of its layers: {error}"
        ) from error
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    x = graph.ndata.get("x")
    if x is not None and autocast is None and len(dtypes) == 1:
        x = x.to(dtypes.pop())
    try:
        with torch.no_grad(), torch.autocast(graph.device.type, autocast, autocast is not None):
            model.eval()
            call_model(model, blocks, x)
    except JoestarError:
        raise
    except Exception as error:
        raise _own(error, model, graph) from error


def _own(error: Exception, model: nn.Module, graph: Graph) -> CaptureError:
    return causes.own(error, model, f"{type(model).__name__} on a batch of {graph.name or 'the graph'}")
