"""Features that several processes of a host read in place: one copy of a file's contents, which all of them lock.

What is mapped from a file cannot be page-locked, and a copy in every process would take as much of the host's memory
as it has GPUs. The copy is an anonymous file in memory (``peer_memory.memory_file``).
"""

import contextlib
import os

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.peer_memory import mapped, memory_file
from joestar.store.pinned import Pinned, copy_parts, mapped_from_file, pin


def pinned_together(source: Tensor, device: torch.device, group: Group) -> Pinned:
    """``pin``, on all ranks of a group; where it would copy, the ranks of a host make one copy together."""
    whole = None if device.type == "cpu" else shared_copy(source, group)
    return pin(source, device) if whole is None else Pinned(whole, device)


def shared_copy(source: Tensor, group: Group) -> Tensor | None:
    """A copy of a CPU tensor in memory of all ranks of the host, each of which has written a part of it.

    All ranks call it with the same values. ``None`` where none is needed (the host has one rank, or the tensor is this
    process's own memory) or can be had (the system keeps processes apart).
    """
    size = source.numel() * source.element_size()
    in_file = size > 0 and mapped_from_file(source.data_ptr(), size)
    met = group.exchange("features, in a file or not", {"host": group.host, "mapped": in_file})
    local = [rank for rank, each in enumerate(met) if each["host"] == group.host]
    wanted = len(local) > 1 and all(met[rank]["mapped"] for rank in local)
    file = _new_file(size) if wanted and group.rank == local[0] else None
    where = f"/proc/{os.getpid()}/fd/{file}" if file is not None else None
    places = group.exchange("where the copy of features is", {"where": where})
    whole = _mapped(places[local[0]]["where"], source) if wanted else None
    ready = group.exchange("the copy of features, mapped", {"ready": whole is not None})
    if file is not None:
        os.close(file)
    whole = whole if all(ready[rank]["ready"] for rank in local) else None
    if whole is not None:
        own, rows = local.index(group.rank), source.shape[0]
        part = slice(rows * own // len(local), rows * (own + 1) // len(local))
        copy_parts(source[part], whole[part])
    group.exchange("the copy of features, written")
    return whole


def _new_file(size: int) -> int | None:
    """A file in memory; ``None`` where the system has none."""
    with contextlib.suppress(OSError, AttributeError):
        return memory_file(size)
    return None


def _mapped(path: str | None, like: Tensor) -> Tensor | None:
    """The memory of a file, as a tensor of that shape and dtype; ``None`` if it is out of reach."""
    with contextlib.suppress(OSError):
        return None if path is None else mapped(path, like.shape, like.dtype)
    return None
