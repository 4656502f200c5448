"""Checksums of many tensors in one launch are those that are added up together elsewhere."""

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.distributed import facts
from joestar.kernels import gpu_checksum


def test_sums_of_every_dtype_and_size():
    random = torch.Generator().manual_seed(3)
    kinds = [torch.float32, torch.float64, torch.bool, torch.float16, torch.bfloat16, torch.uint8, torch.int8]
    kinds += [torch.complex64, torch.complex128, torch.int16]
    tensors = [torch.randn(size, generator=random).mul(50).to(kind) for kind in kinds for size in (0, 1, 7, 1025)]
    tensors += [torch.randint(-(2**63), 2**63 - 1, (3, 700), generator=random), torch.tensor(2.5)]  # sums wrap
    found = gpu_checksum.checksums(tensors[0], tensors)
    assert found == facts.checksums(tensors) and len(set(found)) > 30


def test_more_than_all_programs_take_at_once(monkeypatch):
    monkeypatch.setattr(gpu_checksum, "PROGRAMS", 2)
    long = torch.arange(5 * gpu_checksum.BLOCK + 3, dtype=torch.int32)
    assert gpu_checksum.checksums(long, [long, long[1:].clone()]) == facts.checksums([long, long[1:]])
