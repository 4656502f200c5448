"""Layers of PyTorch's whose own code takes an op that some versions cannot trace."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def traced_layers() -> Iterator[None]:
    """While a program is traced, a ``nn.TransformerEncoderLayer`` that predicts is many ops before PyTorch 2.13: the
    one op that it is otherwise has no fake kernel there."""
    mha = torch.backends.mha
    enabled = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(enabled and torch.__version__ >= "2.13")
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)
