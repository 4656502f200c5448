"""Layers of PyTorch's whose own code cannot be traced as it is."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.torch_private import SpectralNorm


@contextlib.contextmanager
def traced_layers() -> Iterator[None]:
    """While a program is traced, layers have forms that can be.

    A ``nn.TransformerEncoderLayer`` that predicts is many ops before PyTorch 2.13: the one op that it is otherwise has
    no fake kernel there. Spectral norms write their vectors by ``copy_``, not by ``out=``.
    """
    mha = torch.backends.mha
    enabled, plain = mha.get_fastpath_enabled(), SpectralNorm._power_method
    mha.set_fastpath_enabled(enabled and torch.__version__ >= "2.13")
    SpectralNorm._power_method = _power_method
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)
        SpectralNorm._power_method = plain


def _power_method(self, weight_mat: Tensor, n_power_iterations: int) -> None:
    with torch.no_grad():
        for _ in range(n_power_iterations):
            self._u.copy_(F.normalize(torch.mv(weight_mat, self._v), dim=0, eps=self.eps))
            self._v.copy_(F.normalize(torch.mv(weight_mat.H, self._u), dim=0, eps=self.eps))
