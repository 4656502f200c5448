"""The C++ kernels by the names of their ops: ``cpu.spmm``. Importing this module needs the extension."""

import functools

import torch  # noqa: F401 (before the extension: see has_native)

import joestar._native  # noqa: F401
from joestar.kernels import of_op

__getattr__ = functools.partial(of_op, "cpu")
