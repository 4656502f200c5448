"""Directions, duplicates and self-loops against sets of edges counted in plain Python."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.data.structure import EdgeRules, edges_to_csc, make_structure


def expected(edges, rules):
    """(Counter of edges, {edge: position of the first given edge whose data it has})."""
    kept = [(i, e) for i, e in enumerate(edges) if not (rules.drop_self_loops and e[0] == e[1])]
    if rules.drop_duplicates:
        kept = list({e: (i, e) for i, e in reversed(kept)}.values())
    if rules.undirected:
        reverses = [(i, (v, u)) for i, (u, v) in kept if u != v]
        if rules.drop_duplicates:
            there = {e for _, e in kept}
            reverses = [(i, e) for i, e in reverses if e not in there]
        kept += reverses
    return Counter(e for _, e in kept), Counter((i, e) for i, e in kept)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2), max_size=14))
    ),
    st.builds(EdgeRules, st.booleans(), st.booleans(), st.booleans()),
)
def test_edges_and_their_data_are_those_of_plain_sets(case, rules):
    nodes, edges = case
    sources, targets = (np.array([e[side] for e in edges], dtype=np.int64) for side in (0, 1))
    made = make_structure(sources, targets, nodes, rules, "it", order=True)
    rows = np.repeat(np.arange(nodes), np.diff(made.indptr))
    pairs = list(zip(made.indices.tolist(), rows.tolist(), strict=True))
    counted, with_data = expected(edges, rules)
    assert Counter(pairs) == counted
    assert Counter(zip(made.order.tolist(), pairs, strict=True)) == with_data
    assert all(np.all(np.diff(made.indices[a:b]) >= 0) for a, b in zip(made.indptr, made.indptr[1:], strict=False))
    plain = make_structure(sources, targets, nodes, rules, "it")
    assert plain.order is None and (plain.indptr == made.indptr).all() and (plain.indices == made.indices).all()
    considered = [e for e in edges if not (rules.drop_self_loops and e[0] == e[1])]
    assert made.given == len(edges) and made.loops == sum(u == v for u, v in edges)
    assert made.duplicates == len(considered) - len(set(considered))
    left = len(set(considered)) if rules.drop_duplicates else len(considered)
    assert made.added == len(pairs) - left
    assert made.changed == (Counter(edges) != counted)
    if not rules.undirected:
        assert made.one_way == sum((v, u) not in counted for u, v in counted.elements())
    if rules == EdgeRules():
        assert all((a == b).all() for a, b in zip(edges_to_csc(sources, targets, nodes, mirror=True, where=""), (
            made.indptr, made.indices), strict=True))  # fmt: skip


def test_sentences_name_counts_and_choices():
    sources, targets = np.array([0, 0, 1, 2]), np.array([1, 1, 1, 0])
    said = make_structure(sources, targets, 3, EdgeRules(), "").sentence()
    assert said == (
        "4 edges given; 1 self-loop dropped (drop_self_loops=False otherwise); 1 duplicate dropped "
        "(drop_duplicates=False otherwise); 2 reverses added (undirected=False otherwise): 4 edges."
    )
    said = make_structure(sources, targets, 3, EdgeRules(False, False, False), "").sentence()
    assert said == (
        "4 edges given; 1 self-loop kept (drop_self_loops=True otherwise); 1 duplicate kept (drop_duplicates=True "
        "otherwise); directed: 3 have no reverse (undirected=True adds them): 4 edges."
    )
