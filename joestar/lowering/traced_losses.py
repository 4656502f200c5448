"""Losses and other functions of PyTorch's that look at values or sizes on the host, in forms that can be traced."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from joestar.torch_private import assume, functional, nn_functions


@contextlib.contextmanager
def traced_losses() -> Iterator[None]:
    """While a program is traced, these have forms that can be.

    ``F.gaussian_nll_loss`` (and ``nn.GaussianNLLLoss``), and ``torch.take_along_dim``, which compares sizes of its
    arguments on the host, and would hold for one size only. ``torch.einsum`` multiplies from left to right:
    ``opt_einsum``, where that is installed, compares sizes, too.
    """
    plain, taken, method = F.gaussian_nll_loss, torch.take_along_dim, torch.Tensor.take_along_dim

    def take_along_dim(input, indices, dim=None):
        if dim is None or input.dim() != indices.dim():
            return taken(input, indices, dim)
        return _along(input, indices, dim)

    def gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction="mean"):
        if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
            return plain(input, target, var, full, eps, reduction)
        sizes, own = input.shape, var.shape
        if own != sizes and sizes[:-1] == own:
            var = var.unsqueeze(-1)
        elif own != sizes and (len(own) != len(sizes) or not _broadcasts(own, sizes)):
            raise ValueError("var is of incorrect size")
        return _gaussian(input, target, var, full, eps, reduction)

    F.gaussian_nll_loss = gaussian_nll_loss
    torch.take_along_dim = torch.Tensor.take_along_dim = take_along_dim
    try:
        older = _traced_before_213() if torch.__version__ < "2.13" else contextlib.nullcontext()
        with _left_to_right(), older:
            yield
    finally:
        F.gaussian_nll_loss, torch.take_along_dim, torch.Tensor.take_along_dim = plain, taken, method


@contextlib.contextmanager
def _left_to_right() -> Iterator[None]:
    """``torch.einsum`` asks nobody for an order, however scripts have set it: ``flags`` fails where it is switched off,
    and is not seen where ``torch.backends.opt_einsum.enabled`` was assigned."""
    held = vars(torch.backends.opt_einsum)
    before = held.get("enabled")
    held["enabled"] = False
    try:
        yield
    finally:
        del held["enabled"]
        if before is not None:
            held["enabled"] = before


def _along(input: Tensor, indices: Tensor, dim: int) -> Tensor:
    """``gather``, where sizes of 1 go with any other."""
    dim %= input.dim()
    for other in range(input.dim()):
        if other == dim:
            continue
        own, wanted = input.shape[other], indices.shape[other]
        if isinstance(own, int) and own == 1 and wanted is not own:
            input = input.expand([wanted if d == other else -1 for d in range(input.dim())])
        elif isinstance(wanted, int) and wanted == 1 and own is not wanted:
            indices = indices.expand([own if d == other else -1 for d in range(input.dim())])
    return torch.gather(input, dim, indices)


def _broadcasts(own: torch.Size, sizes: torch.Size) -> bool:
    return sum(b for a, b in zip(sizes, own, strict=True) if a != b) == 1


def _gaussian(input: Tensor, target: Tensor, var: Tensor, full: bool, eps: float, reduction: str) -> Tensor:
    """The loss; the gradient of a variance below ``eps`` is that of ``eps``, as in PyTorch."""
    var = torch.ops.joestar.expect(var, var < 0, "F.gaussian_nll_loss expects variances of at least 0")
    clamped = var + (var.detach().clamp(min=eps) - var.detach())
    loss = 0.5 * (torch.log(clamped) + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@contextlib.contextmanager
def _traced_before_213() -> Iterator[None]:
    """What fixes sizes before PyTorch 2.13 in ``F.cross_entropy`` of probabilities and ``F.binary_cross_entropy`` with
    weights, in other forms: what these call, as a loss may be one of them itself."""
    plain, sizes = nn_functions.cross_entropy_loss, functional._infer_size

    def cross_entropy_loss(input, target, weight, reduction, ignored, smoothing):
        classes = input.shape[1:2] if input.dim() > 1 else input.shape
        odd = not 0 <= smoothing <= 1 or (weight is not None and weight.shape != classes)
        if not target.is_floating_point() and input.dim() == 2 and target.dim() == 1:
            assume(input.shape[0] == target.shape[0])  # what two masks pick, alike
        if odd or not target.is_floating_point() or input.shape != target.shape:
            return plain(input, target, weight, reduction, ignored, smoothing)
        return _of_probabilities(input, target, weight, reduction, smoothing)

    nn_functions.cross_entropy_loss, functional._infer_size = cross_entropy_loss, torch.broadcast_shapes
    try:
        yield
    finally:
        nn_functions.cross_entropy_loss, functional._infer_size = plain, sizes


def _of_probabilities(input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float) -> Tensor:
    """Cross-entropy as PyTorch defines it; ``reduction``: 0 none, 1 mean, 2 sum."""
    dim = min(input.dim(), 2) - 1
    if smoothing:
        target = target * (1 - smoothing) + smoothing / input.shape[dim]
    loss = input.log_softmax(dim) * target
    if weight is not None:
        loss = loss * weight.view([-1 if d == dim else 1 for d in range(input.dim())])
    loss = -loss.sum(dim)
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss
