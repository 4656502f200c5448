"""A model's own errors and what it returns: said before, or better than, by a tracer."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.errors import CaptureError, JoestarError
from joestar.graph_api import Block, SamplingContext
from joestar.graph_api.row_source import source_of
from joestar.lowering import causes
from joestar.lowering.outputs import flatten, leaf_names, loss_and_values
from joestar.lowering.sizes import same_size
from joestar.lowering.traced_norms import traced_norms
from joestar.runtime.features import call_model


def raise_own_error(program, seeds: Tensor, key: Tensor) -> None:
    """Runs sampler, a copy of the model and loss eagerly: their own errors say more than the tracer's.

    Raises:
        CaptureError: and others of ours; nothing if all of it works.
    """
    causes.check_forward(program.model, "x" in program.graph.ndata)
    try:
        model = copy.deepcopy(program.model)
    except Exception:  # some models cannot be copied: the tracer has already said what and where
        return
    autocast, device, given = program.options.autocast, program.graph.device.type, ()
    try:
        blocks = program.sampler.sample(program.graph.with_context(SamplingContext(key)), seeds)
        if program.graph.positions is not None:
            blocks = [_of_first_node(block) for block in blocks]
        with torch.autocast(device, autocast, autocast is not None), traced_norms(alone=True):
            x, source = program.graph.ndata.get("x"), source_of(program.graph.ndata, "x")
            outputs, tensors = call_model(model, blocks, x, source), []
        structure = flatten(outputs, tensors, f"{type(program.model).__name__}.forward")
        check_rows(tensors, structure, seeds.numel(), program.loss is None, program.origin)
        if program.loss is not None:
            data = program.graph.ndata
            ids = program.graph.ids_of(seeds).long()
            further = {k: ids if k == "seeds" else data[k][seeds] for k in program.loss.inputs}
            given = outputs, torch.index_select(data["y"], 0, seeds)
            with _as_before(program.loss.module):
                loss_and_values(program.loss.call(*given, **further), program.loss.name)
    except JoestarError:
        raise
    except Exception as error:
        raise causes.own(error, program.model, program.origin, given) from error


@contextlib.contextmanager
def _as_before(module: torch.nn.Module | None) -> Iterator[None]:
    """A loss that counts its calls, or keeps means of them, has not been called."""
    kept = [] if module is None else [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def check_rows(values: list, structure, wanted, handed_out: bool, origin: str, further: bool = False) -> list[bool]:
    """One row per seed in what the model returns: in all of it, where it is ``handed_out``; else somewhere.

    Args:
        further: what has one shape whatever was sampled (a loss of the model's own, 0-d) may be handed out beside rows.

    Returns:
        Of every tensor whether it has one.
    """
    rows = [value.dim() > 0 and same_size(value.shape[0], wanted) for value in values]
    if not values:
        kind = type(structure[1]).__name__ if structure[0] == "const" else f"an empty {structure[0]}"
        raise CaptureError(f"{origin}: forward must return at least one tensor, of one row per seed; got {kind}.")
    fixed = [further and all(isinstance(size, int) for size in value.shape) for value in values]
    fine = [row or one for row, one in zip(rows, fixed, strict=True)]
    if any(rows) and (all(fine) or not handed_out):
        return rows
    wrong = fine.index(False) if False in fine else 0
    where = leaf_names(structure)[wrong]
    raise CaptureError(
        f"{origin}: forward must return one row per seed; got shape {tuple(values[wrong].shape)}"
        f"{where and f' in output{where}'} where {wanted} is the number of seeds. Does the model use all "
        "blocks, in order (input side first)? What else a loss needs may be returned in training mode only "
        "(if self.training: ...): numbers and tensors of one shape; hidden rows where the loss is given to "
        "joestar.compile."
    )


def _of_first_node(block: Block) -> Block:
    """The block, all of whose nodes are node 0: of a part in slots, which are no rows of the user's own tables."""
    block = copy.copy(block)
    block.srcs, block.dsts = torch.zeros_like(block.srcs), torch.zeros_like(block.dsts)
    return block
