"""Memory of every rank that the others on its host read in place: the only module with PyTorch's symmetric memory.

On GPUs the pieces are mapped into all processes' address spaces and read over NVLink (or PCIe, where GPUs reach one
another by it); on CPUs they are pages that all processes share.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from joestar.distributed.address_range import AddressRange
from joestar.distributed.group import Group
from joestar.distributed.place import shown_host
from joestar.errors import ConfigError, DistributedError
from joestar.locks import synchronize


class PeerMemory:
    """A piece of memory per rank, all of one shape, for reading.

    Attributes:
        pieces: tensors by rank, on this process' device; each keeps the memory, until ``close``.
        own: that of this rank, to write to before others read.
    """

    def __init__(self, pieces: list[Tensor], rank: int, held: list):
        self.pieces, self.own, self._held = pieces, pieces[rank], held
        for piece in pieces:
            piece.held = held

    def close(self) -> None:
        """Gives the memory back. Whatever reads it must have ended: captured steps first, communicators afterwards."""
        if self.own is not None and self.own.is_cuda:
            synchronize(self.own.device)
        self.pieces, self.own = [], None
        self._held.clear()


class NoPeerAccessError(Exception):
    """GPUs do not reach one another's memory; says why, the same on all ranks."""


def attempt(group: Group, what: str, work: Callable):
    """``work()`` of this rank, once all ranks have done theirs.

    Raises:
        DistributedError: on all ranks, if it failed on one; with the words of the first.
    """
    result, failed = None, ""
    try:
        result = work()
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error).strip()}"
    met = [each["failed"] for each in group.exchange(what, {"failed": failed})]
    for rank, text in enumerate(met):
        if text:
            raise DistributedError(f"{what} failed on rank {rank}: {text}")
    return result


def check_one_host(group: Group, what: str) -> None:
    """Raises ``ConfigError`` on all ranks, naming the hosts, unless all are on one."""
    if len(set(group.hosts)) > 1:
        where = ", ".join(f"rank {rank} on {shown_host(host)}" for rank, host in enumerate(group.hosts))
        raise ConfigError(
            f"{what} shares memory among the ranks of one host, and these are on several ({where}). Start the job on "
            "one host, or keep everything on every rank: graph.to(device), or joestar.store.FeatureStore."
        )


def shared_pages(
    group: Group, shapes: Sequence[Sequence[int] | None], dtype: torch.dtype, what: str = "joestar.store.shard"
) -> list[Tensor]:
    """Tensors in pages that all processes of the host map: those of every rank that has a shape, in order of ranks.

    Args:
        what: they are for, in messages.

    Raises:
        DistributedError: on all ranks, where the system does not give or share them.
    """
    what = f"{what} (shared memory)"
    shape = shapes[group.rank]
    own = attempt(group, what, lambda: None if shape is None else memory_file(_nbytes(shape, dtype)))
    try:
        name = None if own is None else f"/proc/{os.getpid()}/fd/{own}"
        paths = [each["path"] for each in group.exchange(f"{what}, names", {"path": name})]
        pairs = [(path, shape) for path, shape in zip(paths, shapes, strict=True) if shape is not None]
        return attempt(group, what, lambda: [mapped(path, shape, dtype) for path, shape in pairs])
    finally:
        if own is not None:
            os.close(own)


def memory_file(size: int) -> int:
    """Descriptor of an anonymous file in memory, which no size of ``/dev/shm`` limits.

    It is gone when nobody has it open or mapped any more; others open it as ``/proc/PID/fd/NUMBER``.

    Raises:
        OSError, AttributeError: where the system has none, or no room.
    """
    number = os.memfd_create("joestar")
    try:
        os.ftruncate(number, size)
    except OSError:
        os.close(number)
        raise
    return number


def mapped(path: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The memory of such a file as a tensor; raises ``OSError`` where it cannot be opened or mapped."""
    number = os.open(path, os.O_RDWR)
    try:
        pages = mmap.mmap(number, _nbytes(shape, dtype))
    finally:
        os.close(number)
    with contextlib.suppress(AttributeError, OSError):  # fewer, larger pages are quicker to fill and to lock
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def host_memory(
    group: Group, shape: Sequence[int], dtype: torch.dtype, what: str = "joestar.store.shard"
) -> PeerMemory:
    """A piece per rank in host memory that all processes share; ``what`` it is for, in messages."""
    return PeerMemory(shared_pages(group, [shape] * group.world, dtype, what), group.rank, [])


def device_memory(
    group: Group, shape: Sequence[int], dtype: torch.dtype, what: str = "joestar.store.shard"
) -> PeerMemory:
    """A piece per rank in its GPU's memory, mapped by all.

    Args:
        what: it is for, in messages.

    Raises:
        NoPeerAccessError: on all ranks, if one GPU does not reach another.
        DistributedError: on all ranks, if one has no room.
    """
    what = f"{what} (memory of the GPUs)"
    _check_peers(group, what)
    own = attempt(group, what, lambda: _allocated(shape, dtype, group.device))
    try:
        handle = attempt(group, f"{what}, mapped", lambda: _rendezvous(own, group))
    except DistributedError as error:  # the same on all ranks
        raise NoPeerAccessError(str(error).splitlines()[0][:400]) from error
    pieces = [handle.get_buffer(rank, tuple(shape), dtype) for rank in range(group.world)]
    return PeerMemory(pieces, group.rank, [handle, own])


def joined_memory(group: Group, shape: Sequence[int], dtype: torch.dtype, size: int, what: str) -> Tensor:
    """A tensor over the memories of all GPUs, as this rank sees it: ``size`` bytes of each, by rank.

    It belongs to whoever holds it, on every rank for itself, also behind the end of the job.

    Raises:
        NoPeerAccessError: on all ranks, if one GPU does not reach another, or its memory cannot be mapped again.
        DistributedError: on all ranks, if one has no room.
    """
    memory = device_memory(group, (size,), torch.uint8, what)
    pieces = [piece.data_ptr() for piece in memory.pieces[: -(-_nbytes(shape, dtype) // size)]]
    try:
        found = attempt(group, f"{what} (addresses)", lambda: AddressRange(pieces, size, group.device))
    except DistributedError as error:  # the same on all ranks
        raise NoPeerAccessError(str(error).splitlines()[0][:400]) from error
    finally:
        memory.close()  # what is mapped again stays
    return found.tensor(tuple(shape), dtype)


def _check_peers(group: Group, what: str) -> None:
    """As far as a process sees the others' GPUs; else mapping their memory shows it."""
    devices = [each["device"] for each in group.exchange(f"{what}, devices", {"device": group.device.index})]
    own, seen = group.device.index, len(set(devices)) == group.world <= torch.cuda.device_count()
    if len(set(devices)) < group.world:  # each is shown its own GPU under the same number: PyTorch takes them for one
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    lacking = [d for d in devices if seen and d != own and not torch.cuda.can_device_access_peer(own, d)]
    met = group.exchange(f"{what}, access", {"lacking": lacking})
    pairs = [f"cuda:{devices[rank]} does not reach cuda:{d}" for rank, each in enumerate(met) for d in each["lacking"]]
    if pairs:
        raise NoPeerAccessError("; ".join(pairs[:4]))


def _allocated(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that others can map. Not from ``symm_mem.empty``, whose pool (torch 2.13) never gives memory back."""
    from joestar.torch_private import SymmetricMemory, contiguous_strides

    shape = tuple(shape)
    strides = contiguous_strides(shape)
    with torch.inference_mode(False):
        return SymmetricMemory.empty_strided_p2p(shape, strides, dtype, device)


def _rendezvous(own: Tensor, group: Group):
    from joestar.torch_private import symmetric_memory as symmetric

    return symmetric.rendezvous(own, group.process_group.group_name)
