"""One range of addresses over pieces of memory: what CUDA's driver is asked for, played by one that takes notes."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from joestar.distributed import address_range
from joestar.distributed.address_range import GRANULE, AddressRange, tensor_at
from joestar.store.structure import part_bytes

CPU = torch.device("cpu")
RESERVED = 1 << 40


class Noting:
    """Functions of the driver as C sees them: ``calls`` are names and numbers; ``fails`` those that do not work."""

    def __init__(self, fails=(), before: int = 0):
        self.calls, self.fails, self.before, self.access = [], fails, before, None
        for name, given in address_range._SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *given)(self._played(name)))

    def _played(self, name):
        def play(*given):
            numbers = [each for each in given if isinstance(each, int)]
            self.calls.append((name, *numbers))
            if name in self.fails:
                return 801
            if name == "cuMemGetAddressRange_v2":
                given[0][0], given[1][0] = given[2] - self.before, GRANULE + 4096
            elif name == "cuMemAddressReserve":
                given[0][0] = RESERVED
            elif name == "cuMemRetainAllocationHandle":
                given[0][0] = given[1] + 7
            elif name == "cuMemSetAccess":
                self.access = list((ctypes.c_int * 3).from_address(given[2]))
            return 0

        return play

    def named(self, *names):
        """Calls of these functions."""
        return [call for call in self.calls if call[0] in names]


def test_pieces_are_mapped_side_by_side(monkeypatch):
    monkeypatch.setattr(address_range, "_taken_down", lambda *given: None)  # there may be no such GPU to wait for
    driver = Noting()
    found = AddressRange([111, 222, 333], GRANULE, torch.device("cuda:2"), driver)
    assert (found.address, found.nbytes) == (RESERVED, 3 * GRANULE)
    assert driver.named("cuMemAddressReserve") == [("cuMemAddressReserve", 3 * GRANULE, 0, 0, 0)]
    assert driver.named("cuMemMap") == [
        ("cuMemMap", RESERVED + number * GRANULE, GRANULE, 0, piece + 7, 0)
        for number, piece in enumerate((111, 222, 333))
    ]
    assert driver.named("cuMemRelease") == [("cuMemRelease", piece + 7) for piece in (111, 222, 333)]
    assert driver.named("cuMemSetAccess")[0][1:3] == (RESERVED, 3 * GRANULE) and driver.access == [1, 2, 3]
    assert not driver.named("cuMemUnmap")
    del found
    gc.collect()


def test_it_is_taken_down_when_nobody_holds_it():
    driver = Noting()
    found = AddressRange([111, 222], GRANULE, CPU, driver)
    del found
    gc.collect()
    assert driver.calls[-3:] == [
        ("cuMemUnmap", RESERVED, GRANULE), ("cuMemUnmap", RESERVED + GRANULE, GRANULE),
        ("cuMemAddressFree", RESERVED, 2 * GRANULE),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["cuMemRetainAllocationHandle", "cuMemMap", "cuMemSetAccess"])
def test_what_fails_leaves_nothing_behind(name):
    driver = Noting(fails=[name])
    with pytest.raises(OSError, match=f"{name}: CUDA error 801"):
        AddressRange([111, 222], GRANULE, CPU, driver)
    mapped = 2 if name == "cuMemSetAccess" else 0
    assert len(driver.named("cuMemUnmap")) == mapped and len(driver.named("cuMemAddressFree")) == 1
    retained = [call for call in driver.named("cuMemRetainAllocationHandle") if name != call[0]]
    assert len(driver.named("cuMemRelease")) == len(retained)


def test_memory_that_does_not_begin_its_allocation_is_not_mapped():
    with pytest.raises(OSError, match="does not begin where its allocation does"):
        AddressRange([1 << 20], GRANULE, CPU, Noting(before=64))
    with pytest.raises(OSError, match="does not begin"):  # or is too small
        AddressRange([1 << 20], 2 * GRANULE, CPU, Noting())


def test_a_tensor_and_its_views_keep_the_memory():
    numbers = (ctypes.c_int32 * 12)(*range(12))
    owner = SimpleNamespace(gone=[])

    class Owner:
        def __del__(self):
            owner.gone.append(True)

    whole = tensor_at(ctypes.addressof(numbers), (3, 4), torch.int32, CPU, Owner())
    assert torch.equal(whole, torch.arange(12, dtype=torch.int32).view(3, 4)) and whole.is_contiguous()
    view = whole[1, 1:3].detach()
    del whole
    gc.collect()
    assert view.tolist() == [5, 6] and not owner.gone
    del view
    gc.collect()
    assert owner.gone


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 640, 641])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_cover_everything(nbytes, world):
    size = part_bytes(nbytes, world, 64)
    assert size % 64 == 0 and size * world >= nbytes and (size == 64 or (size - 64) * world < nbytes)
