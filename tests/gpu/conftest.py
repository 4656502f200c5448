"""For all tests on a GPU."""

import pytest
import torch


@pytest.fixture
def exact_products():
    """Products in float32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
