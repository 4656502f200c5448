"""What the host does between two steps: it waits for words in memory, and looks whether mappings are as they were.

Both are asked in every step, where Python alone would take longer than the rest of the host's part.
"""

import ctypes
import itertools
import operator
import select
import time
from collections.abc import Mapping

from joestar.kernels import has_native


def plain_await_words(address: int, stride: int, count: int, mask: int, value: int, microseconds: int) -> bool:
    """Whether some words in memory have become ``value`` under ``mask`` within so many microseconds.

    Other threads run meanwhile. It does not sleep: the shortest sleep takes some 70 us, a fifth of a step.

    Args:
        address: of the first word, int64; stride: from each to the next, in words; count: of words.
    """
    words = [ctypes.c_int64.from_address(address + 8 * stride * place) for place in range(count)]
    end = time.perf_counter() + microseconds * 1e-6
    while not all(word.value & mask == value for word in words):
        if time.perf_counter() >= end:
            return False
        select.select((), (), (), 0)
    return True


def plain_same_entries(mappings: list[Mapping], sizes: list[int], keys: list, values: list) -> bool:
    """Whether some mappings hold the same keys in the same order, and the same objects under them.

    Args:
        sizes: of every mapping, when it was noted; keys, values: of all of them, one mapping behind the other.
    """
    chained = itertools.chain.from_iterable
    return (
        list(map(len, mappings)) == sizes
        and list(chained(mappings)) == keys
        and all(map(operator.is_, chained(mapping.values() for mapping in mappings), values))
    )


if has_native():
    from joestar._native import await_words, same_entries
else:
    await_words, same_entries = plain_await_words, plain_same_entries
