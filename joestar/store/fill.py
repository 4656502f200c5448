"""Rows into slots of an arena: from memory that the GPU reads in place, or through a staging buffer."""

from collections.abc import Callable

from torch import Tensor

from joestar.errors import DataError
from joestar.kernels import find

_ON_GPU = {"fill_rows": "gpu_fill", "place_structure": "gpu_place"}


def kernel_for(tensor: Tensor, name: str) -> Callable:
    """``fill_rows``, ``gather_into``, ``place_structure`` or what hidden rows need, for a tensor's device.

    Raises:
        DataError: where neither Triton nor the C++ extension can run.
    """
    if tensor.is_cuda:
        found = find(f"{_ON_GPU[name]}.{name}")
        missing = "Triton, which comes with PyTorch's CUDA builds on Linux"
    else:
        found = find(f"cpu_store.{name}")
        missing = "the extension joestar._native, which pip install builds (joestar doctor says what it lacks)"
    if found is None:
        raise DataError(f"features outside of the GPU need {missing}.")
    return found


def fill_rows(source: Tensor, ids: Tensor, slots: Tensor, out: Tensor, programs: int | None = None) -> None:
    """``out[slots[i]] = source[ids[i]]``, on the current stream of ``out``'s device.

    Args:
        source: ``[N, ...]``, contiguous: a view of page-locked memory (``Pinned.view``) or memory of the device.
        ids: int32 or int64 ``[n]``, in ascending order where the source is host memory: that is three times as fast.
        slots: int32 or int64 ``[n]``, each slot once. All on ``out``'s device.
        out: ``[K, ...]``; rows of the same dtype are moved as bytes, else both must be floating-point: converted.
        programs: on a GPU how many run at a time (32 by default), so that a training step runs beside them.

    Raises:
        ValueError: for shapes or dtypes that do not fit. IndexError: on a CPU, for a row that is not there.
    """
    kernel_for(out, "fill_rows")(source, ids, slots, out, programs)


def host_gather(table: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """``table[ids]`` in C++ with all threads: from ordinary memory or a mapped file into a staging buffer.

    Args:
        table: ``[N, ...]`` on the CPU, contiguous. ids: int32 or int64 ``[n]`` on the CPU.
        out: ``[n, ...]`` of its dtype, best page-locked (``pinned_empty``); new memory by default.

    Raises:
        ValueError: for shapes or dtypes that do not fit. IndexError: for an id that is no row.
    """
    return kernel_for(table, "gather_into")(table, ids, out)
