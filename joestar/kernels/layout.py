"""Layouts that kernels and their callers agree on."""

CAT_ALIGNMENT = 8
"""Rows of joined matrices are multiples of this: 16 bytes of bfloat16, as GEMMs want them."""


def cat_width(width: int) -> int:
    """Columns of ``[aggregated rows, own rows, 1, 0, ...]`` for rows of ``width``; the 1 multiplies the bias."""
    return -(-(2 * width + 1) // CAT_ALIGNMENT) * CAT_ALIGNMENT
