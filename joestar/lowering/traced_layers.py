"""Layers of PyTorch's whose own code cannot be traced as it is."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from joestar.torch_private import SpectralNorm, comptime

ALONG_ROWS = "goes along the rows of a sampled set, one after the other"


@contextlib.contextmanager
def traced_layers() -> Iterator[None]:
    """While a program is traced, layers have forms that can be.

    A ``nn.TransformerEncoderLayer`` that predicts is many ops before PyTorch 2.13: the one op that it is otherwise has
    no fake kernel there. Spectral norms write their vectors by ``copy_``, not by ``out=``. Recurrent layers refuse
    sequences of a size that varies, which would be traced step by step, for minutes, and refused then.
    """
    mha = torch.backends.mha
    enabled, plain, checked = mha.get_fastpath_enabled(), SpectralNorm._power_method, nn.RNNBase.check_input
    mha.set_fastpath_enabled(enabled and torch.__version__ >= "2.13")
    SpectralNorm._power_method = _power_method

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        checked(self, input, batch_sizes)
        if batch_sizes is None:
            _check_length(input, 1 if self.batch_first else 0, type(self).__name__)

    nn.RNNBase.check_input = check_input
    try:
        yield
    finally:
        mha.set_fastpath_enabled(enabled)
        SpectralNorm._power_method = plain
        nn.RNNBase.check_input = checked


def _check_length(rows: Tensor, along: int, layer: str) -> None:
    """Traced: what it is called with is looked at meanwhile."""

    @comptime
    def _(context) -> None:
        along, layer = (context.get_local(name).as_python_constant() for name in ("along", "layer"))
        if isinstance(context.get_local("rows").as_fake().shape[along], torch.SymInt):
            raise RuntimeError(f"nn.{layer} {ALONG_ROWS}")


def _power_method(self, weight_mat: Tensor, n_power_iterations: int) -> None:
    with torch.no_grad():
        for _ in range(n_power_iterations):
            self._u.copy_(F.normalize(torch.mv(weight_mat, self._v), dim=0, eps=self.eps))
            self._v.copy_(F.normalize(torch.mv(weight_mat.H, self._u), dim=0, eps=self.eps))
