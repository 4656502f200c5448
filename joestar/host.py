"""What the host does between two steps: it waits for words in memory, and looks whether mappings are as they were.

Both are asked in every step, where Python alone would take longer than the rest of the host's part.
"""

import ctypes
import itertools
import operator
import select
import time
from collections.abc import Mapping


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
        and all(map(_same_key, chained(mappings), keys))
        and all(map(operator.is_, chained(mapping.values() for mapping in mappings), values))
    )


def _same_key(key, known) -> bool:
    """Others than strings may compare in ways of their own: tensors do."""
    return key is known or (isinstance(key, str) and isinstance(known, str) and key == known)


def plain_same_addresses(tensors: list, addresses: list[int]) -> bool:
    """Whether the values of some tensors are where they were; a tensor without memory of its own is at 0."""
    return list(map(address, tensors)) == addresses


def address(tensor) -> int:
    """Where a tensor's values begin; 0 if it has no storage of its own."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def plain_same_functions(functions: list, codes: list, defaults: list, keywords: list) -> bool:
    """Whether some functions have the code, the defaults and those of keywords that they had."""
    return all(
        function.__code__ is code and function.__defaults__ is default and function.__kwdefaults__ is keyword
        for function, code, default, keyword in zip(functions, codes, defaults, keywords, strict=True)
    )


try:
    from joestar._native import await_words, same_addresses, same_entries, same_functions
except ImportError:  # the extension is not built
    await_words, same_entries = plain_await_words, plain_same_entries
    same_addresses, same_functions = plain_same_addresses, plain_same_functions
