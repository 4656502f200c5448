"""``joestar::own_words``: what a rank adds to the sum over the ranks besides its gradients."""

import torch
from torch import Tensor

from joestar.ops.registry import NO_GRADIENT, Padding, define


def own_words(
    gradients: Tensor, words: Tensor, values: list[Tensor], shares: Tensor, ok: Tensor, decisive: int
) -> None:
    """Writes a rank's losses, weighted, and whether it is to blame that the step does not happen, into the buffer.

    Args:
        gradients: ``[n]``, set to 0 if the share of number ``decisive`` is 0: the rank has none that count; else left
            as they are.
        words: ``[V + 1]``, written: every value times its share (0 where that is 0, whatever the value), then ``~ok``.
        values: V times 0-d, the loss and what is logged; shares: float64 ``[1 + V]``: that of the loss, one that is not
            used here, those of what is logged; ok: 0-d bool.
    """
    gradients.masked_fill_(shares[decisive] == 0, 0.0)
    own = torch.stack([value.to(words.dtype) for value in values])
    parts = torch.cat([shares[:1], shares[2:]]).to(words.dtype)
    words.copy_(torch.cat([torch.where(parts == 0, 0.0, own * parts), (~ok).to(words.dtype).view(1)]))


define(
    "own_words(Tensor(a!) gradients, Tensor(b!) words, Tensor[] values, Tensor shares, Tensor ok, int decisive) -> ()",
    own_words, fake=lambda gradients, words, values, shares, ok, decisive: None, gradient=NO_GRADIENT,
    padding=Padding.REFUSED, cuda="gpu_step",
)  # fmt: skip
