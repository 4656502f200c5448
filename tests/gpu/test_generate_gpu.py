"""A planted graph has the same bits, whichever processor makes it."""

import dataclasses

import pytest
import torch

from joestar.data.generate import generate
from joestar.data.planted import SHAPES, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ODD = Shape(300_007, 29.1, 1.03, 8192, 0.8, 1.5, 131, 172, 1_000, 100, 100)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", [ODD, dataclasses.replace(SHAPES["mini"], skew=2.0)])
def test_files_are_those_of_the_cpu(tmp_path, shape, dtype):
    folders = [generate(shape, tmp_path / device, dtype=dtype, seed=7, device=device) for device in ("cpu", "cuda")]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
