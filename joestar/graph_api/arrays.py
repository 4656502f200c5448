"""NumPy arrays, lists and masks where tensors go: turned into tensors at the border, once, and what changes is said."""

import warnings
from collections.abc import Iterator, KeysView, ValuesView

import numpy as np
import torch
from torch import Tensor, nn

from joestar.errors import GraphError, SeedError, say
from joestar.torch_private import FakeTensor

SHORTENED = ("x", "y", "edge_attr", "edge_weight", "w")
"""Names by convention whose float64 values become float32: models compute in float32."""
_NO_SEQUENCES = (set, frozenset, Iterator, KeysView, ValuesView)
SPLITS = ("train_idx", "val_idx", "test_idx")


def to_tensor(value, name: str, error: type[Exception] = GraphError) -> Tensor:
    """A tensor of the same values; tensors are returned as they are (``plain``), arrays share their memory.

    Args:
        value: a tensor, NumPy array, a list of numbers, or what NumPy can read (a pandas or polars column).
        name: how messages call it.

    Raises:
        error: what came is text, ragged, or holds Python objects.
    """
    if isinstance(value, Tensor):
        return plain(value, name, error)
    if isinstance(value, _NO_SEQUENCES):
        in_order = "sorted" if isinstance(value, (set, frozenset)) else "list"
        raise error(f"{name} is a {type(value).__name__}, no sequence: give a list, {in_order}({name}).")
    if hasattr(value, "toarray"):
        raise error(f"{name} is a sparse matrix ({type(value).__name__}): give its dense values, value.toarray().")
    if value is None or isinstance(value, (str, bytes, dict, bool, int, float)):
        raise error(f"{name} must be a tensor, NumPy array or list of numbers; got {type(value).__name__}.")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as reason:
        told = str(reason).rstrip(".")
        raise error(f"{name} must be a tensor or array of numbers, each row as long as the others: {told}.") from None
    if array.dtype.kind not in "iufb":
        raise error(
            f"{name} must hold numbers; got {type(value).__name__} of dtype {array.dtype}. Text ids and text classes "
            "become numbers with joestar.data.from_tables."
        )
    return from_array(array, name, error)


def plain(value: Tensor, name: str, error: type[Exception] = GraphError) -> Tensor:
    """The tensor itself, or the plain one that a subclass stands for, such as PyG's ``EdgeIndex``.

    Parameters that can be trained stay: a model that has them trains them as features, too.

    Raises:
        error: a subclass has no memory of its own, such as a ``DTensor``.
    """
    if torch.compiler.is_compiling() or type(value) is Tensor or isinstance(value, FakeTensor):
        return value
    if isinstance(value, nn.Parameter):
        return value if value.dtype.is_floating_point else value.detach()
    found = value.as_tensor() if hasattr(value, "as_tensor") else value.as_subclass(Tensor)
    try:
        found.untyped_storage().data_ptr()
    except RuntimeError:
        raise error(
            f"{name} is a {type(value).__name__}, which has no memory of its own: give a plain torch.Tensor of its "
            "values."
        ) from None
    return found


def from_array(array: np.ndarray, name: str, error: type[Exception] = GraphError) -> Tensor:
    """A tensor over a numeric array's memory, read-only maps included; dtypes that PyTorch lacks are widened."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise error(f"{name} holds {array.max()}, beyond int64. Relabel ids with joestar.data.from_tables.")
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(step < 0 for step in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def shortened(value: Tensor, key: str, name: str) -> Tensor:
    """The values of a NumPy array as float32, if they are float64 and of a conventional name; says so."""
    if key not in SHORTENED or value.dtype != torch.float64:
        return value
    say(
        f"{name} was float64, NumPy's default, and is kept as float32, which models compute in. Convert it with "
        f".astype(numpy.float32) to have it said no more; assign a float64 tensor to keep float64."
    )
    return to_float32(value, name)


def to_float32(value: Tensor, name: str, error: type[Exception] = GraphError) -> Tensor:
    """The values in float32.

    Raises:
        error: a finite one is beyond float32.
    """
    found = value.float()
    lost = found.isinf() & ~value.isinf()
    if bool(lost.any()):
        place = torch.nonzero(lost)[0].tolist()
        raise error(
            f"{name} holds {value[tuple(place)].item():g} at {place}, beyond float32, whose largest number is 3.4e38: "
            "scale the values, or keep float64 (assign a float64 tensor; model.double())."
        )
    return found


def version(tensor: Tensor) -> int | None:
    """How often a tensor was written in place; ``None`` if it does not count."""
    return None if tensor.is_inference() else tensor._version


def to_ids(value, name: str, error: type[Exception] = GraphError) -> Tensor:
    """Node ids, int32 or int64, from a tensor, an array, a list or a range.

    Raises:
        error: they are no integers.
    """
    value = torch.empty(0, dtype=torch.int64, device="cpu") if _is_empty(value) else to_tensor(value, name, error)
    if value.dtype == torch.bool:
        raise error(f"{name} is a mask; give node ids: mask.nonzero().flatten().")
    if value.dtype.is_floating_point or value.dtype.is_complex:
        raise error(f"{name} must be int64 or int32 node ids; got {value.dtype}.")
    return value if value.dtype in (torch.int32, torch.int64) else value.to(torch.int64)


def _is_empty(value) -> bool:
    return isinstance(value, (list, tuple, range)) and not len(value)


def settle(graph, dtype: torch.dtype | None) -> None:
    """Brings features and labels into the form that a compiled step takes, once, and says what it changed.

    ``x`` and targets ``y`` in float64 become float32 where the model is; class ids become int64 ``[N]``, whatever their
    integer dtype, and ``[N, 1]`` (as OGB and many PyG datasets have it) loses its second dimension.

    Args:
        dtype: of the model's floating-point parameters; ``None`` where they differ or there are none.
    """
    x, y = graph.ndata.get("x"), graph.ndata.get("y")
    if x is not None and x.dtype == torch.float64 and dtype == torch.float32:
        if x.is_meta:
            raise GraphError(
                "graph.ndata['x'] is stored over several ranks in float64 and the model computes in float32: take "
                "joestar.store.shard(x, dtype=torch.float32), or model.double()."
            )
        say("graph.ndata['x'] was float64 and is float32 now, as the model's parameters are (model.double() keeps it).")
        graph.ndata["x"] = to_float32(x, "graph.ndata['x']")
    if y is None:
        return
    if y.dtype == torch.float64 and dtype == torch.float32:
        say("graph.ndata['y'] was float64 and is float32 now, as the model's parameters are.")
        graph.ndata["y"] = to_float32(y, "graph.ndata['y']")
    settle_classes(graph)


def settle_classes(graph) -> None:
    """Class ids as int64 ``[N]``; see ``settle``. Floating-point labels, targets ``[N, T]``, stay as they are."""
    y = graph.ndata.get("y")
    if y is None or y.dtype.is_floating_point or y.dtype.is_complex:
        return
    if y.dim() == 2 and y.shape[1] == 1:
        say(f"graph.ndata['y'] of shape {list(y.shape)} holds a class id per node: it is [{y.shape[0]}] now.")
        y = y.squeeze(1)
    if y.dtype != torch.int64:
        say(f"graph.ndata['y'] was {_short(y.dtype)} and is int64 now, as class ids are in PyTorch's losses.")
        y = y.to(torch.int64)
    if y is not graph.ndata["y"]:
        graph.ndata["y"] = y


def tell_classes(graph, num_classes: int | None = None) -> None:
    """Brings labels into their form (``settle_classes``) and notes of the graph how many classes they are of.

    Targets ``[N, T]`` of 0, 1 and NaN are several labels per node, in a floating-point dtype.

    Args:
        num_classes: what a dataset knows of it; ``None``: the largest id plus 1.
    """
    settle_classes(graph)
    y = graph.ndata.get("y")
    if y is not None and not y.dtype.is_floating_point and y.dim() == 1:
        known = y[y >= 0]
        graph.num_classes = num_classes or (int(known.max()) + 1 if known.numel() else None)
    elif y is not None and y.dim() == 2 and bool(((y == 0) | (y == 1) | torch.isnan(y)).all()):
        graph.multilabel, graph.num_classes = True, y.shape[1]
        if not y.dtype.is_floating_point:
            graph.ndata["y"] = y.to(torch.float32)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Split:
    """An attribute of a graph that holds node ids or ``None``; arrays, lists and masks are turned into ids."""

    def __set_name__(self, owner, name: str):
        self.name, self.kept = name, f"_{name}"

    def __get__(self, graph, owner=None):
        return self if graph is None else getattr(graph, self.kept)

    def __set__(self, graph, value) -> None:
        if value is not None:
            value = _of_mask(value, graph.num_nodes)
            value = to_ids(value, f"graph.{self.name}", SeedError)
        setattr(graph, self.kept, value)


def _of_mask(value, num_nodes: int):
    """The ids where a mask ``[num_nodes]`` is true, or 1 if it is of 0 and 1; anything else as it is."""
    if not isinstance(value, Tensor):
        try:
            array = np.asarray(value)
        except ValueError:  # of rows of several lengths
            return value
        if array.dtype.kind not in "bui":
            return value
        mask = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    else:
        mask = value
    if mask.shape != (num_nodes,) or mask.dtype.is_floating_point or not is_mask(mask):
        return value
    ids = mask.dtype != torch.bool and num_nodes <= 2  # [1, 0] of two nodes names both; of more, ids would repeat
    return value if ids else torch.nonzero(mask).flatten()


def is_mask(value: Tensor) -> bool:
    """Whether a tensor is of booleans, or of 0 and 1."""
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())
