"""What steps write besides the model's state: buffers of a loss, banks and counters in plain attributes or closures.

A state has these tensors by their names in the captured program, ``import_main_bank`` or ``model.count``. They are
written back when the program is captured again, which is before it runs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from joestar.errors import CheckpointError
from joestar.host import address
from joestar.lowering.inputs import Kind

_KINDS = (Kind.BUFFER, Kind.PARAMETER, Kind.CONSTANT)


def written_by(program, data: bool = True) -> dict[str, Tensor]:
    """Name -> tensor that a program writes, and that the model's ``state_dict()`` does not have; what is to be written
    back, if it is not captured yet.

    Args:
        data: also tensors of the graph.
    """
    if program.captured is None:
        return dict(program.restored or {})
    state = program.model.state_dict().values()
    saved = {address(value) for value in state if isinstance(value, Tensor) and value.numel()}
    roles = (role for role in program.written_roles if role.kind in _KINDS or (data and role.of_data))
    return {role.name: role.tensor.detach() for role in roles if address(role.tensor) not in saved}


def check_written(program, values) -> None:
    """``CheckpointError`` unless ``write_back`` can take over a state's tensors, as far as that is known yet."""
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise CheckpointError(f"the checkpoint's 'written' must be tensors by name; got {type(values).__name__}.")
    if program.captured is not None:
        _matched(program, values)


def write_back(program, values: Mapping[str, Tensor]) -> None:
    """Gives the tensors that a program writes the values of a state, now or when it is captured.

    Raises:
        CheckpointError: the program writes none like these; nothing was changed then.
    """
    if program.captured is None:
        program.restored = dict(values)
        return
    pairs, program.restored = _matched(program, values), None
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)


def _matched(program, values: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(tensor, its value): of the same name, else the first of the same form that has none."""
    ours = written_by(program)
    left = {name: tensor for name, tensor in ours.items() if name not in values}
    pairs = []
    for name, value in values.items():
        found = name if name in ours else next((n for n, t in left.items() if _form(t) == _form(value)), None)
        tensor = ours.get(found)
        left.pop(found, None)
        if tensor is None or _form(tensor) != _form(value):
            came = "no such tensor" if tensor is None else f"one {_words(tensor)}"
            raise CheckpointError(
                f"the checkpoint has {name} {_words(value)}, a tensor that steps wrote and that is not in the model's "
                f"state_dict; this program writes {came}. Compile the same model and loss; or empty state['written'], "
                "to go on with what is there."
            )
        pairs.append((tensor, value))
    return pairs


def _form(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype


def _words(tensor: Tensor) -> str:
    return f"of shape {list(tensor.shape)} in {tensor.dtype}"
