"""What every implementation of dropout bits shares."""

DROPOUT_SITE = 1 << 20
"""Offset of dropout's call sites, so that they never meet those of sampling."""

KEEP_DIGITS = 24
"""Binary digits of the probability of keeping an entry."""


def keep_numerator(p: float) -> int:
    """``q``, 0 < q < 2**24, for which ``q / 2**24`` is nearest to the probability ``1 - p`` of keeping an entry."""
    return min(max(round((1.0 - p) * 2**KEEP_DIGITS), 1), 2**KEEP_DIGITS - 1)
