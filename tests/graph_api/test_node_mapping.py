"""From ids to what nodes were called, and back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.errors import GraphError
from joestar.graph_api import Graph, NodeMapping


def mapping(raw):
    if all(isinstance(value, int) for value in raw):
        return NodeMapping(np.array(raw, dtype=np.int64))
    made = np.empty(len(raw), dtype=object)
    for i, value in enumerate(raw):
        made[i] = value
    return NodeMapping(made)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, unique=True)
    | st.lists(st.text(), min_size=1, unique=True)
    | st.lists(st.tuples(st.integers(), st.text()), min_size=1, unique=True),
    st.randoms(use_true_random=False),
)
def test_there_and_back(raw, random):
    table = mapping(raw)
    order = [random.randrange(len(raw)) for _ in range(7)]
    for form in (list, np.array, torch.tensor):
        assert table.to_raw(form(order)) == [raw[i] for i in order]
    assert table.to_ids([raw[i] for i in order]).tolist() == order
    assert table.to_ids(raw[order[0]]) == order[0] and table.to_raw(order[0]) == raw[order[0]]
    assert table == mapping(raw) and len(table) == len(raw)
    assert (table == mapping(raw[::-1])) == (raw == raw[::-1])
    if table.is_integer:
        assert table.to_ids(np.array(raw)).tolist() == list(range(len(raw)))
        assert table.is_identity == (raw == list(range(len(raw))))


def test_unknown_ids():
    numbers, words = mapping([10**12, 5]), mapping(["a", "b"])
    for table, wrong, message in (
        (numbers, [5, 6, 7], r"no node has the raw id 6 \(2 of 3 are unknown\); .* such as 1000000000000, 5"),
        (numbers, ["5"], r"the raw ids of this graph are integers; got '5' \(str\)"),
        (numbers, 2**70, "beyond int64"),
        (words, "c", "no node has the raw id 'c'"),
        (words, ["a", 1], "no node has the raw id 1"),
    ):
        with pytest.raises(GraphError, match=message):
            table.to_ids(wrong)
    for wrong in ([2], -1, [0.5], ["a"]):
        with pytest.raises(GraphError, match=r"to_raw needs node ids in 0..1"):
            numbers.to_raw(wrong)
    assert repr(words) == "NodeMapping(2 nodes: 'a', 'b')"


def test_it_goes_with_the_graph():
    graph = Graph.from_edge_index([[0, 1], [1, 0]])
    graph.mapping, graph.class_names = mapping(["a", "b"]), ["x", "y"]
    for other in (
        graph.reverse(),
        graph.add_self_loops(),
        graph + graph,
        graph.keyed(1),
        graph.to("cpu"),
        graph.to("meta"),
    ):
        assert other.mapping is graph.mapping and other.class_names == ["x", "y"]
