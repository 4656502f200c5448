"""How the C++ kernels use threads and memory of this process, and what precision PyTorch's products have in it."""

import torch

from joestar._native import keep_freed_memory, num_threads, set_num_threads

__all__ = ["in_tensor_cores", "keep_freed_memory", "num_threads", "products_in_tf32", "set_num_threads"]


def products_in_tf32() -> bool:
    """Whether float32 products on a GPU may use TF32, however that was said.

    PyTorch's older ``allow_tf32`` may not be read any more once the newer ``fp32_precision`` was set.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def in_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether a GPU's tensor cores multiply values of a dtype: 16 bits, and float32 where TF32 is allowed."""
    return products_in_tf32() if dtype == torch.float32 else dtype in (torch.bfloat16, torch.float16)
