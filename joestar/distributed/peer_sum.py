"""A sum over the ranks of one host by a kernel of ours, which reads what the others add from their memory.

NCCL's all-reduce of a step's gradients takes 13 us on two H200 and 17 to 20 on four, beside launches that prepare its
buffer and read its outcome: here it is one launch for all of it, 7 us on two and 11 to 13 on four
(docs/benchmarks-history.md).
"""

import ctypes

import torch
from torch import Tensor

from joestar.cuda_driver import Driver
from joestar.distributed.group import Group
from joestar.distributed.peer_memory import NoPeerAccessError, PeerMemory, device_memory, host_memory
from joestar.distributed.place import rank_sum
from joestar.errors import DistributedError
from joestar.kernels import has_triton
from joestar.locks import synchronize

MOST = 2**23
"""Bytes that a rank reads of the others. With more NCCL does it; where that begins to be quicker was not measured."""


_ATTRIBUTE = {"cuDeviceGetP2PAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)}
_NATIVE_ATOMICS = 3


class PeerSum:
    """For one buffer ``[n]``: memory that all ranks map, and the number of the sum.

    Args:
        group: the ranks. out: where sums come to, float32 or float64 ``[n]``.
        memory: a region of ``gpu_ranks.region_bytes`` per rank, zeros.
    """

    def __init__(self, group: Group, out: Tensor, memory: PeerMemory):
        from joestar.kernels import gpu_ranks

        self.group, self.out, self.memory = group, out, memory
        addresses = [piece.data_ptr() for piece in memory.pieces]
        self._pointers = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(out.device)
        self._counters = gpu_ranks.counters(out.device)
        self.happens = torch.ones((), dtype=torch.bool, device=out.device)
        self._one = torch.ones(1, dtype=torch.float64, device=out.device)
        group.frees_memory(memory)

    @classmethod
    def of(cls, group: Group, out: Tensor) -> "PeerSum | None":
        """Made by all ranks together; ``None`` on all of them where NCCL, or gloo, has to do it."""
        if not serves(out) or len(set(group.hosts)) > 1 or rank_sum() != "kernel":
            return None
        if (group.world - 1) * out.nbytes > MOST or out.dtype not in (torch.float32, torch.float64):
            return None
        try:
            return cls(group, out, shared_region(group, out))
        except (NoPeerAccessError, DistributedError):  # on all ranks
            group.check()
            return None

    def __call__(
        self, parts: list[Tensor], starts: list[int], gradients: int, values: list[Tensor], shares: Tensor, ok: Tensor,
        decisive: int,
    ) -> Tensor:  # fmt: skip
        """Sums up into ``out``: see ``gpu_ranks.sum_ranks``; returns whether the step happens on all ranks."""
        from joestar.kernels import gpu_ranks

        with self.group.together():
            gpu_ranks.sum_ranks(
                self.out, parts, starts, gradients, values, shares, ok, self.happens, self._pointers, self._counters,
                self.group.rank, decisive,
            )  # fmt: skip
        return self.happens

    def again(self) -> None:
        """``out`` becomes its own sum over the ranks."""
        self([self.out], [0], 0, [], self._one, self.happens, 0)


def serves(out: Tensor) -> bool:
    """Whether the kernel can run where the buffer is."""
    return out.is_cuda and has_triton()


def check_atomics(group: Group, what: str, driver: Driver | None = None) -> None:
    """Numbers of a sum are exchanged between GPUs as one operation, which NVLink has and PCIe may not have.

    Raises:
        NoPeerAccessError: on all ranks, if two GPUs lack it, or a process is not shown all GPUs and cannot know.
    """
    devices = [each["device"] for each in group.exchange(f"{what}, devices", {"device": group.device.index})]
    own, known = group.device.index, len(set(devices)) == group.world <= torch.cuda.device_count()
    lacking = -1 if not known else next((d for d in devices if d != own and not _atomic(own, d, driver)), None)
    for rank, each in enumerate(group.exchange(f"{what}, atomics", {"lacking": lacking})):
        if each["lacking"] is not None:
            raise NoPeerAccessError(f"rank {rank} does not know of atomic operations on the memory of all GPUs")


def _atomic(device: int, other: int, driver: Driver | None = None) -> bool:
    found = ctypes.c_int()
    try:
        given = ctypes.addressof(found), _NATIVE_ATOMICS, device, other
        (Driver(_ATTRIBUTE) if driver is None else driver)("cuDeviceGetP2PAttribute", *given)
    except OSError:
        return False
    return bool(found.value)


def shared_region(group: Group, out: Tensor) -> PeerMemory:
    """Regions for sums into ``out``, which nobody touches before all are zeros.

    Raises:
        NoPeerAccessError, DistributedError: on all ranks, see ``device_memory`` and ``check_atomics``.
    """
    from joestar.kernels.gpu_ranks import region_bytes

    size, what = region_bytes(out.numel(), out.dtype, group.world), "the sum over ranks"
    if out.is_cuda:
        check_atomics(group, what)
    make = device_memory if out.is_cuda else host_memory
    memory = make(group, (size,), torch.uint8, what)
    memory.own.zero_()
    if out.is_cuda:
        synchronize(out.device)
    group.exchange(f"{what}, zeros")
    return memory
