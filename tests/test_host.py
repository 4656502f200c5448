"""What the host does between two steps, in C++ and in Python."""

import collections
import threading
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from joestar import host
from joestar.runtime.facts import Entries, Functions

AWAIT = [host.await_words, host.plain_await_words]
SAME = [host.same_entries, host.plain_same_entries]


class Own(collections.abc.Mapping):
    """A mapping that is no dictionary, like a graph's columns."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, key):
        return self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_the_extension_is_used():
    from joestar import _native

    assert host.await_words is _native.await_words and host.same_entries is _native.same_entries


# --- words ---


@pytest.mark.parametrize("await_words", AWAIT)
@pytest.mark.parametrize("stride", [1, 8])
def test_words_that_are_there_and_such_that_are_not(await_words, stride):
    words = torch.zeros(3 * stride, dtype=torch.int64)
    words[::stride] = torch.tensor([0x501, -255, 1])  # all end in 01, of 8 bits
    given = (words.data_ptr(), stride, 3, 0xFF, 1, 20)
    assert await_words(*given)
    for place in range(3):
        before = int(words[place * stride])
        words[place * stride] = 2
        assert not await_words(*given)
        words[place * stride] = before
    assert await_words(*given)


@pytest.mark.parametrize("await_words", AWAIT)
def test_the_number_is_all_but_the_last_bit(await_words):
    words = torch.tensor([7 << 1 | 1, 7 << 1], dtype=torch.int64)
    assert await_words(words.data_ptr(), 1, 2, ~1, 7 << 1, 0)
    words[1] = 8 << 1
    assert not await_words(words.data_ptr(), 1, 2, ~1, 7 << 1, 0)


@pytest.mark.parametrize("await_words", AWAIT)
def test_another_thread_writes_meanwhile(await_words):
    words = torch.zeros(2, dtype=torch.int64)
    waits = threading.Event()

    def write():
        waits.wait()
        words[0] = words[1] = 9

    thread = threading.Thread(target=write)
    thread.start()
    waits.set()
    looks = 0
    while not await_words(words.data_ptr(), 1, 2, -1, 9, 100):
        looks += 1
        assert looks < 100_000
    thread.join()


# --- mappings ---

KEYS = st.sampled_from(["a", "b", "c", 1, None])
VALUES = [object() for _ in range(4)]
DICTS = st.dictionaries(KEYS, st.sampled_from(VALUES), max_size=4)
KINDS = st.sampled_from([dict, collections.OrderedDict, Own, types.MappingProxyType])


@given(st.lists(st.tuples(DICTS, KINDS), max_size=4), st.lists(DICTS, max_size=4))
def test_both_say_the_same_of_any_mappings(held, others):
    mappings = [kind(content) for content, kind in held]
    noted = Entries(mappings)
    assert noted.same()
    changed = [kind(other) for (_, kind), other in zip(held, others, strict=False)]
    changed += mappings[len(changed) :]
    expected = [list(m.items()) for m in changed] == [list(m.items()) for m in mappings]
    for same in SAME:
        assert same(changed, noted._sizes, noted._keys, noted._values) is expected


@pytest.mark.parametrize("same", SAME)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_what_changes_in_a_dictionary(same, kind):
    first, second = kind(a=VALUES[0], b=VALUES[1]), kind(c=VALUES[2])
    noted = Entries([first, second, {}])
    asked = noted._mappings, noted._sizes, noted._keys, noted._values
    assert same(*asked)
    first["a"] = VALUES[3]
    assert not same(*asked)
    first["a"] = VALUES[0]
    assert same(*asked)
    del first["a"]
    assert not same(*asked)
    first["a"] = VALUES[0]  # behind b now
    assert not same(*asked)
    if kind is collections.OrderedDict:
        first.move_to_end("b")
        assert same(*asked)
    second["d"] = VALUES[2]
    assert not same(*asked)


def test_an_equal_value_is_not_the_same_object():
    held = {"a": [1]}
    noted = Entries([held])
    held["a"] = [1]
    assert not noted.same()


@pytest.mark.parametrize("same", SAME)
def test_what_a_mapping_raises_is_raised(same):
    class Broken(Own):
        def values(self):
            raise LookupError("no values")

    noted = Entries([Own({"a": VALUES[0]})])
    with pytest.raises(LookupError, match="no values"):
        same([Broken({"a": VALUES[0]})], noted._sizes, noted._keys, noted._values)


@pytest.mark.parametrize("same", SAME)
@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, lambda held: collections.defaultdict(dict, held)])
def test_keys_that_compare_in_a_way_of_their_own(same, kind):
    first, second = torch.ones(2), torch.ones(2)
    noted = Entries([kind({first: VALUES[0]})])
    asked = noted._sizes, noted._keys, noted._values
    assert same([kind({first: VALUES[0]})], *asked) and not same([kind({second: VALUES[0]})], *asked)


# --- tensors and functions ---


@pytest.mark.parametrize("same", [host.same_addresses, host.plain_same_addresses])
def test_where_tensors_are(same):
    tensors = [torch.ones(3), torch.ones(2, 2), torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.empty(0)]
    known = [host.address(tensor) for tensor in tensors]
    assert known[2] == known[3] == 0 and same(tensors, known)
    before = tensors[1].data
    tensors[1].data = torch.ones(2, 2)
    assert not same(tensors, known)
    tensors[1].data = before
    assert same(tensors, known)

    class Broken:
        def data_ptr(self):
            raise LookupError("no memory")

    with pytest.raises(LookupError, match="no memory"):
        same([Broken()], [1])


@pytest.mark.parametrize("plain", [False, True])
def test_what_functions_have(plain, monkeypatch):
    if plain:
        monkeypatch.setattr(host, "same_functions", host.plain_same_functions)

    def first(a, b=2, *, c=3):
        return a, b, c

    def second(a, b=4, *, c=5):
        return b, a, c

    functions = Functions([first, second, test_where_tensors_are])
    assert functions.same()
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        before = getattr(first, name)
        setattr(first, name, getattr(second, name))
        assert not functions.same()
        setattr(first, name, before)
        assert functions.same()
    first.__defaults__ = None
    assert not functions.same()
