"""Host memory that the GPU reads in place: page-locked, and seen by kernels as a CUDA tensor ("zero-copy").

``pin`` takes a tensor as it is and locks its pages where that is possible, else copies it, part by part, into locked
memory: what is mapped from a file cannot be locked. Memory comes from the system directly and is registered:
``tensor.pin_memory()`` would round 53 GiB up to 64. Pages are unlocked, once, when neither the ``Pinned`` nor any
view of it is in use any more. Where there is no GPU, the view is the host tensor itself.
"""

import contextlib
import functools
import math
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from joestar.errors import DataError
from joestar.locks import RECORDING

COPY_BYTES = 2**26
"""Bytes copied at a time, so that a source mapped from a file does not have to fit into memory beside its copy."""
IN_PLACE_BYTES = 2**26
"""Tensors from this size on are locked where they are; pages of smaller ones may hold other things as well."""
_PORTABLE_MAPPED = 1 | 2
_ALREADY_REGISTERED = 712


class _LockedAlreadyError(DataError):
    """Some of the pages are locked: by a view of the same tensor, or for a neighbour."""


class _Registration:
    """Locked pages of a tensor: unlocked when nobody holds this any more, by ``unregister``, exactly once."""

    def __init__(self, host: Tensor, device: torch.device):
        self.host = host
        self.nbytes = host.numel() * host.element_size()
        _register(host.data_ptr(), self.nbytes, device)
        end = weakref.finalize(self, _unregister, host.data_ptr(), device, host.untyped_storage())
        end.atexit = False  # the process ends, and its locks with it; CUDA may be gone already


class _DeviceArray:
    """Bytes of locked host memory for ``torch.as_tensor``, whose result keeps this object, and so the memory."""

    def __init__(self, registration: _Registration):
        self.registration = registration
        self.__cuda_array_interface__ = {
            "shape": (registration.nbytes,),
            "typestr": "|u1",  # the protocol does not know bfloat16: every dtype travels as bytes
            "data": (registration.host.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


class Pinned:
    """A tensor in host memory and the view of it that kernels read.

    Attributes:
        host: the tensor on the CPU, contiguous.
        view: the same memory as a tensor of ``device``; on a CPU ``host`` itself.
        device: whose kernels read it.
    """

    def __init__(self, host: Tensor, device: torch.device):
        self.host, self.device = host, device
        if device.type != "cuda" or host.numel() == 0:
            self.view = host if device.type == "cpu" else torch.empty_like(host, device=device)
            return
        registration = _Registration(host, device)
        seen = torch.as_tensor(_DeviceArray(registration), device=device)
        if seen.data_ptr() != host.data_ptr():
            raise DataError(
                f"{device} cannot read host memory in place: this system gives locked memory another address on the "
                "device. Keep the data resident, or let the host gather them."
            )
        self.view = seen.view(host.dtype).view(host.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.host.numel() * self.host.element_size()

    def __repr__(self) -> str:
        return f"Pinned({self.host.dtype} {list(self.host.shape)}, {self.nbytes / 2**30:.3g} GiB, for {self.device})"


def pin(source: Tensor, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Pinned:
    """Puts a tensor into page-locked memory that ``device`` reads in place.

    Args:
        source: on the CPU. A large contiguous tensor is locked where it is, if no conversion is asked for: it and the
            ``Pinned`` then share memory. Everything else, as a file mapped into memory, is copied.
        device: a GPU, or the CPU, where nothing is locked; by default the current GPU if there is one.
        dtype: of the locked tensor, by default the source's; features may be kept in bfloat16 or float16.

    Raises:
        DataError: if the pages cannot be locked; says how much was asked for.
    """
    device = resolved(device)
    _check_source(source)
    source = source.detach()
    same = dtype is None or dtype == source.dtype
    if same and source.is_contiguous() and (device.type == "cpu" or lockable_in_place(source)):
        with contextlib.suppress(_LockedAlreadyError):
            return Pinned(source, device)
    pinned = pinned_empty(source.shape, dtype or source.dtype, device)
    copy_parts(source, pinned.host)
    return pinned


def pinned_empty(shape, dtype: torch.dtype, device: torch.device | str | None = None) -> Pinned:
    """Page-locked memory without content, to be filled through ``host``: ``shape`` of ``dtype``, for ``device``.

    Raises:
        DataError: if there is not so much memory, or it cannot be locked.
    """
    return Pinned(host_empty(shape, dtype), resolved(device))


def host_empty(shape, dtype: torch.dtype) -> Tensor:
    """A CPU tensor in pages of its own, given back to the system with it; zero until written."""
    shape = tuple(shape)
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # fewer, larger pages are quicker to fill and to lock
            pages.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError, ValueError) as error:
        raise DataError(
            f"no memory for {dtype} {list(shape)} on the host: asked for {_gib(size)}, available {_available()}. Store "
            "features in bfloat16 or float16, or leave them in the file (host gather)."
        ) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def copy_parts(source: Tensor, out: Tensor, progress: Callable[[int], None] | None = None) -> None:
    """``out.copy_(source)``, ``COPY_BYTES`` at a time along the first dimension; converts.

    Args:
        progress: called with the rows done so far.
    """
    if source.dim() == 0:
        out.copy_(source)
        return
    row = max(1, source[:1].numel() * max(source.element_size(), out.element_size()))
    step = max(1, COPY_BYTES // row)
    for first in range(0, source.shape[0], step):
        out[first : first + step].copy_(source[first : first + step])
        if progress is not None:
            progress(min(first + step, source.shape[0]))


def resolved(device: torch.device | str | None) -> torch.device:
    """A device with its number: by default the current GPU, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_source(source: Tensor) -> None:
    if not isinstance(source, Tensor):
        raise DataError(f"pin: expected a tensor, got {type(source).__name__}; torch.from_numpy(array) makes one")
    if not source.is_cpu or source.layout != torch.strided:
        raise DataError(f"pin: expected a dense tensor on the CPU, got one on {source.device}; move it with .cpu()")


def lockable_in_place(tensor: Tensor) -> bool:
    """Whether a tensor's pages may be locked where they are: its own, and not those of a file."""
    size = tensor.numel() * tensor.element_size()
    return size >= IN_PLACE_BYTES and not mapped_from_file(tensor.data_ptr(), size)


def mapped_from_file(address: int, size: int) -> bool:
    """Whether some of the memory belongs to a file: locking it would fail or write to the file."""
    try:
        text = Path("/proc/self/maps").read_text()
    except OSError:  # not Linux: nobody knows, so it is copied
        return True
    for line in text.splitlines():
        span, _, _, _, inode = line.split()[:5]
        first, last = (int(end, 16) for end in span.split("-"))
        if first < address + size and address < last and inode != "0":
            return True
    return False


def _register(address: int, size: int, device: torch.device) -> None:
    RECORDING.settle()  # perhaps these very pages are still locked
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE_MAPPED))
        if code == 0:
            return
        _clear_error(device)
    if code == _ALREADY_REGISTERED:
        raise _LockedAlreadyError("pages that are locked already")
    raise DataError(
        f"the GPU driver could not lock {_gib(size)} of host memory (CUDA error {code}); available {_available()}, "
        f"lockable {_lockable()}. Store features in bfloat16 or float16, give the process or container more memory "
        "(ulimit -l unlimited), or leave the data unpinned (host gather)."
    )


def _unregister(address: int, device: torch.device, memory: object) -> None:
    """``memory`` is what must outlive the lock. Unlocking waits for the device, which no capture stands."""
    RECORDING.soon(functools.partial(_unlock, address, device, memory), not torch.cuda.is_current_stream_capturing())


def _unlock(address: int, device: torch.device, memory: object) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # a kernel may still read
        if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
            _clear_error(device)
    del memory


def _clear_error(device: torch.device) -> None:
    """Takes back the error of the last call, which the next launch of anybody would report as its own."""
    try:
        torch.ones(1, dtype=torch.float32, device=device).add_(1)
    except RuntimeError:
        return


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def free_host_bytes() -> int | None:
    """Host memory that the system could give, to this container if it is in one; ``None`` if nobody says so."""
    known = [free for free in (_free_of_machine(), _free_of_container(Path("/sys/fs/cgroup"))) if free is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    except (OSError, StopIteration, ValueError):
        return None


def _free_of_container(group: Path) -> int | None:
    """Up to the limit of a control group (version 2), where pages of files give way; ``None`` without a limit."""
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(facts[name]) for name in ("active_file", "inactive_file"))
        return None if limit == "max" else max(0, int(limit) - max(0, int(used) - cached))
    except (OSError, KeyError, ValueError):
        return None


def _available() -> str:
    free = free_host_bytes()
    return "unknown" if free is None else _gib(free)


def _lockable() -> str:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return "without limit" if limit == resource.RLIM_INFINITY else f"at most {_gib(limit)} (ulimit -l)"
    except (ImportError, OSError):
        return "unknown"
