"""What every implementation of dropout bits shares."""

import torch
from torch import Tensor

DROPOUT_SITE = 1 << 20
"""Offset of dropout's call sites, so that they never meet those of sampling."""

KEEP_DIGITS = 24
"""Binary digits of the probability of keeping an entry."""


def keep_numerator(p: float) -> int:
    """``q``, 0 < q < 2**24, for which ``q / 2**24`` is nearest to the probability ``1 - p`` of keeping an entry."""
    return min(max(round((1.0 - p) * 2**KEEP_DIGITS), 1), 2**KEEP_DIGITS - 1)


def positive_bits(x: Tensor, bits: Tensor) -> Tensor:
    """``bits`` of the entries of ``x`` ``[n, D]`` that are positive or NaN (which ReLU lets pass).

    int32 ``[n, ceil(D / 32)]``; 0 past column D.
    """
    rows, words = bits.shape
    positive = torch.nn.functional.pad((~(x <= 0)).to(torch.int32), (0, 32 * words - x.shape[1]))
    shift = torch.arange(32, dtype=torch.int32, device=x.device)
    packed = (positive.reshape(rows, 32, words) << shift[:, None]).sum(1, dtype=torch.int32)
    return (bits & packed).contiguous()
