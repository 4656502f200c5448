"""The Triton kernels by the names of their ops: ``gpu.spmm``, on CUDA tensors (``TRITON_INTERPRET=1``: on the CPU's).

Nothing waits for the device unless a bound of -1 asks for exact sizes, so that every op can be captured in a CUDA
graph after one run outside of it. Importing this module needs Triton, not a GPU.
"""

import functools

import triton  # noqa: F401

from joestar.kernels import of_op

__getattr__ = functools.partial(of_op, "cuda")
