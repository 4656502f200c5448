"""What TorchDynamo traces: the user's sampler, model and loss as one function of seeds and key."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.graph_api import Graph, SamplingContext, check_blocks
from joestar.graph_api.row_source import source_of
from joestar.lowering.loss import Loss
from joestar.lowering.outputs import LEAF, flatten, loss_and_values
from joestar.runtime.features import call_model


@dataclass
class Seen:
    """What a trace says about Python.

    Attributes:
        structure: of what the model returned (``lowering.outputs``); logged: names of what the loss returned beside.
        pushed: layers of which rows are pushed.
    """

    structure: object = field(default_factory=lambda: LEAF)
    logged: tuple[str, ...] = ()
    pushed: tuple[int, ...] = ()


def traceable(graph: Graph, sampler, model, loss: Loss | None) -> tuple[Callable[..., tuple], Seen]:
    """(function, what is seen while it runs).

    The function takes (seeds ``[n]``, key ``[3]``, carriers of the sizes of sampled sets) and returns tensors: with a
    loss its value, what is logged, two per pushed layer; then what the model returned, flattened.
    """
    features, targets, data = graph.ndata.get("x"), graph.ndata.get("y"), dict(graph.ndata)
    source = source_of(graph.ndata, "x")
    name, model_name = type(sampler).__name__, f"{type(model).__name__}.forward"
    call, inputs, loss_name = (None, (), "") if loss is None else (loss.call, loss.inputs, loss.name)
    seen = Seen()

    @torch.compiler.assume_constant_result  # called while Dynamo traces
    def note(structure, names, layers):
        seen.structure, seen.logged, seen.pushed = structure, names, layers
        return 0

    def program(seeds, key, carriers):
        context = SamplingContext(key, [carrier.shape[0] for carrier in carriers])
        blocks = sampler.sample(graph.with_context(context), seeds)
        check_blocks(blocks, name)
        outputs, tensors = call_model(model, blocks, features, source), []
        structure = flatten(outputs, tensors, model_name)
        if call is None:
            note(structure, (), ())
            return tuple(tensors)
        further = {k: graph.ids_of(seeds).long() if k == "seeds" else _rows(data[k], seeds) for k in inputs}
        value = call(outputs, torch.index_select(targets, 0, seeds), **further)
        value, logged = loss_and_values(value, loss_name)
        pushed = [tensor for _, *pair in context.pushed for tensor in pair]
        note(structure, tuple(logged), tuple([layer for layer, *_ in context.pushed]))
        return (value, *logged.values(), *pushed, *tensors)

    return program, seen


def _rows(table: Tensor, nodes: Tensor) -> Tensor:
    return torch.index_select(table, 0, nodes)
