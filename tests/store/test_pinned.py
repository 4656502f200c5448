"""Page-locked memory: what is locked in place or copied, locked and unlocked once. CUDA is played by a fake."""

import contextlib
import gc

import numpy as np
import pytest
import torch

from joestar.errors import DataError
from joestar.store import pinned as module
from joestar.store.pinned import copy_parts, host_empty, mapped_from_file, pin, pinned_empty

GPU = torch.device("cuda", 0)


class FakeCuda:
    """Stands in for the runtime: keeps what is registered, refuses what a test wants refused."""

    def __init__(self):
        self.locked, self.log, self.code = {}, [], 0

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.log.append(("lock", address, size, flags))
        if self.code == 0:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.log.append(("unlock", address))
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module, "IN_PLACE_BYTES", 2**16)
    monkeypatch.setattr(module, "_clear_error", lambda device: fake.log.append(("clear",)))
    return fake


def seen_as(monkeypatch):
    """``torch.as_tensor`` of the device array: the bytes at its address, holding the array as the real one does."""

    def as_tensor(array, device):
        first = array.__cuda_array_interface__["data"][0]
        view = array.registration.host.reshape(-1).view(torch.uint8)
        assert (view.data_ptr(), device) == (first, GPU)
        holders.append(array)
        return view

    holders = []
    monkeypatch.setattr(module.torch, "as_tensor", as_tensor)
    return holders


def test_on_a_cpu_the_view_is_the_tensor():
    x = torch.arange(6.0).reshape(2, 3)
    pinned = pin(x, "cpu")
    assert pinned.view is pinned.host and pinned.host.data_ptr() == x.data_ptr()
    assert pinned.nbytes == 24


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_conversion_copies(dtype):
    x = torch.arange(12.0).reshape(4, 3)
    pinned = pin(x, "cpu", dtype)
    assert torch.equal(pinned.view, x.to(dtype)) and pinned.view.dtype == dtype


def test_what_is_not_contiguous_is_copied():
    x = torch.arange(12).reshape(4, 3).t()
    assert torch.equal(pin(x, "cpu").view, x) and pin(x, "cpu").view.is_contiguous()


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(dtype, marks=pytest.mark.fuzz) for dtype in (torch.bfloat16, torch.int32))]
)
def test_memory_is_locked_in_place_and_unlocked_once(cuda, monkeypatch, dtype):
    holders = seen_as(monkeypatch)
    x = host_empty((1024, 64), dtype)
    address, size = x.data_ptr(), x.numel() * x.element_size()
    pinned = pin(x, GPU)
    assert cuda.log == [("lock", address, size, 3)]
    assert (pinned.view.dtype, pinned.view.shape) == (dtype, x.shape)
    del pinned
    gc.collect()
    assert cuda.locked, "a view is still in use"
    holders.clear()
    gc.collect()
    assert cuda.log[1:] == [("unlock", address)] and not cuda.locked


def test_a_mapped_file_is_copied(cuda, monkeypatch, tmp_path):
    seen_as(monkeypatch)
    path = tmp_path / "x.bin"
    np.arange(40_000, dtype=np.float32).tofile(path)
    x = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+", shape=(400, 100)))
    assert mapped_from_file(x.data_ptr(), 16) and not mapped_from_file(host_empty([99], torch.int32).data_ptr(), 99)
    pinned = pin(x, GPU)
    assert cuda.log[0][1] == pinned.host.data_ptr() != x.data_ptr()
    assert torch.equal(pinned.host, x)


def test_small_tensors_do_not_lock_the_pages_of_their_neighbours(cuda, monkeypatch):
    seen_as(monkeypatch)
    a, b = torch.arange(10), torch.arange(10)
    pages = [pin(x, GPU) for x in (a, b)]
    assert len(cuda.locked) == 2 and all(p.host.data_ptr() % 4096 == 0 for p in pages)


def test_nothing_is_locked_for_an_empty_tensor(cuda, monkeypatch):
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, device: real(x))
    assert pin(torch.empty(0, 4), GPU).view.shape == (0, 4) and not cuda.log


def test_refused_locks_say_what_was_asked_and_leave_no_error_behind(cuda):
    cuda.code = 2
    with pytest.raises(DataError, match=r"could not lock 0\.00 GiB .*CUDA error 2.*available .*bfloat16"):
        pinned_empty((100, 100), torch.float32, GPU)
    assert cuda.log[-1] == ("clear",) and not cuda.locked
    gc.collect()
    assert ("unlock",) not in [entry[:1] for entry in cuda.log], "never locked, so never unlocked"


def test_a_capture_is_not_broken_by_what_dies_during_it(cuda, monkeypatch):
    holders = seen_as(monkeypatch)
    pinned, capturing = pin(host_empty((1024, 64), torch.float32), GPU), [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    del pinned
    holders.clear()
    gc.collect()
    assert len(cuda.locked) == 1
    capturing[0] = False
    other = pin(host_empty((1024, 64), torch.float32), GPU)
    assert list(cuda.locked) == [other.host.data_ptr()]


def test_pages_that_are_locked_already_are_copied(cuda, monkeypatch):
    seen_as(monkeypatch)
    x = host_empty((100, 1000), torch.float32).fill_(3)
    first = pin(x, GPU)
    real, codes = cuda.cudaHostRegister, [712, 0]

    def register(address, size, flags):
        cuda.code = codes.pop(0)
        return real(address, size, flags)

    cuda.cudaHostRegister = register
    second = pin(x, GPU)
    assert first.host.data_ptr() == x.data_ptr() != second.host.data_ptr()
    assert torch.equal(second.host, x) and len(cuda.locked) == 2


def test_impossible_sizes_and_foreign_things_are_refused():
    with pytest.raises(DataError, match=r"asked for .* GiB, available"):
        host_empty((2**50, 2**10), torch.float32)
    with pytest.raises(DataError, match="expected a tensor, got list"):
        pin([1, 2], "cpu")
    with pytest.raises(DataError, match="on the CPU, got one on meta"):
        pin(torch.empty(3, device="meta"), "cpu")


def test_copies_go_part_by_part(monkeypatch):
    monkeypatch.setattr(module, "COPY_BYTES", 100)
    x, out, seen = torch.arange(77.0).reshape(11, 7), torch.empty(11, 7, dtype=torch.bfloat16), []
    copy_parts(x, out, seen.append)
    assert torch.equal(out, x.bfloat16()) and seen == [3, 6, 9, 11]
    copy_parts(torch.tensor(3.0), out[0, 0])
    assert out[0, 0] == 3
