"""One range of addresses over the memories of several GPUs: a tensor whose parts lie on all of them.

A driver maps memory in pages, and pages of different GPUs may lie side by side: kernels then read such a tensor as they
read any other, peers' parts over NVLink. The only module that talks to CUDA's driver.
"""

import ctypes
import functools
import weakref

import torch
from torch import Tensor

from joestar.cuda_driver import Driver
from joestar.locks import RECORDING, synchronize

GRANULE = 2 << 20
"""Bytes: pieces are multiples of it, as GPUs' pages are."""
_DEVICE, _READ_WRITE = 1, 3
_SIGNATURES = {
    "cuMemGetAddressRange_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64),
    "cuMemAddressReserve": (
        ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong
    ),
    "cuMemRetainAllocationHandle": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p),
    "cuMemMap": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_ulonglong),
    "cuMemSetAccess": (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemUnmap": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemAddressFree": (ctypes.c_uint64, ctypes.c_size_t),
    "cuMemRelease": (ctypes.c_uint64,),
}  # fmt: skip


class AddressRange:
    """Pieces of memory, one behind the other, whatever addresses they have elsewhere.

    The memory stays as long as this object, or a tensor of it, even if it is given back elsewhere, also by its owner.

    Args:
        pieces: addresses of memory that is mapped for ``device``, each the first of its allocation.
        size: bytes of every piece, a multiple of ``GRANULE``. library: CUDA's driver, by default that of the system.

    Attributes:
        address: of the first byte; nbytes: of all pieces.

    Raises:
        OSError: if the driver does not do it; says which of its functions, and its error.
    """

    def __init__(self, pieces: list[int], size: int, device: torch.device, library=None):
        self.device, self.nbytes = device, size * len(pieces)
        self._call = call = Driver(_SIGNATURES, library)
        for piece in pieces:
            _check_first(call, piece, size)
        found = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(found), self.nbytes, 0, 0, 0)
        self.address, mapped = found.value, []
        try:
            for number, piece in enumerate(pieces):
                _map_again(call, piece, self.address + number * size, size)
                mapped.append(self.address + number * size)
            access = _Access(_DEVICE, device.index or 0, _READ_WRITE)
            call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(access), 1)
        except OSError:
            _take_down(call, mapped, size, self.address, self.nbytes)
            raise
        end = weakref.finalize(self, _taken_down_soon, device, call, mapped, size, self.address, self.nbytes)
        end.atexit = False  # the process ends, and its mappings with it

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first bytes as a contiguous tensor; it and its views keep the memory."""
        return tensor_at(self.address, shape, dtype, self.device, self)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, owner) -> Tensor:
    """Memory at an address as a contiguous tensor; it and its views keep ``owner``, which keeps the memory."""
    from joestar.torch_private import storage_at

    numel = torch.Size(shape).numel()
    with torch.inference_mode(False):
        storage = storage_at(address, device, numel * dtype.itemsize)
        storage.held = owner  # PyTorch keeps the object of a storage as long as the storage
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,)).view(shape)


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``: which device may do what."""

    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


def _check_first(call: Driver, piece: int, size: int) -> None:
    """Whole allocations are mapped from their beginning on: nothing else would be there."""
    first, room = ctypes.c_uint64(), ctypes.c_size_t()
    call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(room), piece)
    if first.value != piece or room.value < size:
        raise OSError("the memory of a GPU does not begin where its allocation does")


def _map_again(call: Driver, piece: int, address: int, size: int) -> None:
    handle = ctypes.c_uint64()
    call("cuMemRetainAllocationHandle", ctypes.byref(handle), piece)
    try:
        call("cuMemMap", address, size, 0, handle.value, 0)
    finally:
        call("cuMemRelease", handle.value)  # the mapping holds the memory


def _taken_down_soon(device: torch.device, *given) -> None:
    """Waits for the device, which no capture stands."""
    busy = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    RECORDING.soon(functools.partial(_taken_down, device, *given), not busy)


def _taken_down(device: torch.device, *given) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            synchronize()  # a kernel may still read
    _take_down(*given)


def _take_down(call: Driver, mapped: list[int], size: int, address: int, nbytes: int) -> None:
    for piece in mapped:
        call("cuMemUnmap", piece, size)
    call("cuMemAddressFree", address, nbytes)
