"""For all tests: without a GPU, Triton's kernels run in its interpreter, on CPU tensors."""

import os

import torch

# Triton reads the variable when it is first imported, which `import joestar` does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
