"""What steps write besides the model's state: buffers of a loss, banks and counters in plain attributes or closures.

A state has these tensors by their names in the captured program, ``import_main_bank`` or ``model.count``. They are
written back when the program is captured again, which is before it runs.
"""

import weakref
from collections.abc import Mapping, Set

import torch
from torch import Tensor

from joestar.errors import CheckpointError, say
from joestar.host import address
from joestar.lowering.inputs import Kind

_KINDS = (Kind.BUFFER, Kind.PARAMETER, Kind.CONSTANT)


def note_written(program) -> None:
    """Adds what a captured program writes to what it has ever written: what it was captured with may change."""
    for role in program.written_roles:
        if role.kind in _KINDS or role.of_data:
            program.ever_written[role.name] = weakref.ref(role.tensor)


def written_by(program, data: bool = True) -> dict[str, Tensor]:
    """Name -> tensor that a state has: what a program has written, and what waits to be written back, as it is not
    captured.

    Args:
        data: also tensors of the graph.
    """
    return {name: t.detach() for name, t in _written(program, data).items()} | (program.restored or {})


def _written(program, data: bool = True) -> dict[str, Tensor]:
    """Name -> tensor that a program has written, and that no ``state_dict()`` of model or loss has."""
    owners = [module for module in (program.model, program.loss and program.loss.module) if module is not None]
    state = (value for module in owners for value in module.state_dict().values())
    saved = {address(value) for value in state if isinstance(value, Tensor) and value.numel()}
    ever = ((name, ref()) for name, ref in program.ever_written.items() if data or not name.startswith("graph."))
    return {name: tensor for name, tensor in ever if tensor is not None and address(tensor) not in saved}


def check_written(program, values) -> None:
    """``CheckpointError`` unless ``write_back`` can take over a state's tensors, as far as that is known yet."""
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"the checkpoint's 'written' must be tensors by name; got {type(values).__name__}.")
    if program.captured is not None:
        _matched(program, values)


def write_back(program, values: Mapping[str, Tensor]) -> Set[str]:
    """Gives the tensors that a program writes the values of a state, now or when it is captured.

    Returns:
        Their names.

    Raises:
        CheckpointError: the program writes none like these; nothing was changed then.
    """
    if program.captured is None:
        program.restored = dict(values)
        return values.keys()
    pairs, program.restored = _matched(program, values), None
    with torch.no_grad():
        for name, tensor, value in pairs:
            tensor.copy_(value)
            program.ever_written.setdefault(name, weakref.ref(tensor))
    return {name for name, _, _ in pairs}


def say_what_stays(program, given: Set[str], data: bool) -> None:
    """Warns of what a program has written that a state did not have: before the first step it is not known.

    Args:
        given: names of what the state had; data: whether it has tensors of the graph, too.
    """
    names = _written(program, data).keys() - given
    if names:
        say(
            f"the state does not have {', '.join(sorted(names))}, which steps have written: it was saved before the "
            "first of them, or by an earlier version. What they hold now stays. What is a persistent buffer of the "
            "model, or of a loss that is a module, is part of every state."
        )


def _matched(program, values: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """(its name, tensor, its value): of the same name; else the only one of the same form, outside of the graph."""
    ours = _written(program)
    held = ours | {role.name: role.tensor for role in program.captured.roles if role.held}
    spare = [name for name in ours if name not in values and not name.startswith("graph.")]
    pairs = []
    for name, value in values.items():
        alike = [other for other in spare if _form(ours[other]) == _form(value)]
        renamed = [other for other in values if other not in held and _form(values[other]) == _form(value)]
        own = alike[0] if name not in held and len(alike) == len(renamed) == 1 else name
        tensor = held.get(own)
        if tensor is None or _form(tensor) != _form(value):
            came = "no such tensor" if tensor is None else f"one {_words(tensor)}"
            raise CheckpointError(
                f"the checkpoint has {name} {_words(value)}, a tensor that steps wrote and that is not in the model's "
                f"state_dict; this program writes {came}. Compile the same model and loss; or empty state['written'], "
                "to go on with what is there."
            )
        pairs.append((own, tensor, value))
    return pairs


def _form(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype


def _words(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)} in {tensor.dtype}"
