"""Extract-select: a slice of columns and its row-wise sample become one op."""

import operator

from captures import cheaper, real
from lowering.harness import same

from .graphs import ATEN, JOESTAR, Model, build, captured, count, mean, only, run

PATTERN = "extract-select"


def two_hops(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x).relu())


def test_before_and_after():
    before = captured(Model(two_hops)).trace()
    after = captured(Model(two_hops), disable=only(PATTERN)).trace()
    for op, old, new in (("slice_cols", 2, 0), ("rowwise_sample", 2, 0), ("sample_cols", 0, 2), ("compact", 2, 2)):
        target = getattr(JOESTAR, op).default
        assert (count(before, target), count(after, target)) == (old, new)


def test_same_picks():
    on, off = (captured(Model(two_hops), disable=disable) for disable in (only(PATTERN), only()))
    for step in range(3):
        expected = off.exact(off.seeds(), step)
        same(on.exact(on.seeds(), step), expected, 0.0)
        same(on.padded(on.seeds(), step), expected, 1e-12)


def test_reports_where_it_fired():
    with cheaper(real):
        case = captured(Model(two_hops), disable=only(PATTERN))
    fired = [place for place in case.program.places if place.pattern == PATTERN and place.fired]
    assert [place.detail for place in fired] == ["fanout 3", "fanout 2"]
    assert "neighbor.py" in fired[0].source


def test_every_edge_is_no_sample():
    """A hop without sampling has a slice but no row-wise sample: nothing to fuse, nothing to report."""
    case = captured(Model(two_hops), (-1, -1), disable=only(PATTERN))
    assert count(case.trace(), JOESTAR.slice_cols.default) == 2
    assert not case.program.places


def sampled(call, value, *, indptr=0, indices=0, other_ids=False, reader=False):
    """A slice and its sample; ``indptr``, ``indices``: which of two slices they come from."""
    structure = [value(name) for name in ("indptr", "indices", "dsts", "count")]
    dsts, key, other = structure[2], value("key"), value("other")
    slices = [call(JOESTAR.slice_cols.default, *structure, 9) for _ in range(2)]
    arguments = [call(operator.getitem, slices[indptr], 0), call(operator.getitem, slices[indices], 1)]
    sample = call(JOESTAR.rowwise_sample.default, *arguments, other if other_ids else dsts, 2, False, key, 0, 9)
    result = call(operator.getitem, sample, 1)
    return call(ATEN.add.Tensor, result, call(ATEN.neg.default, arguments[1])) if reader else result


def refusal(**options) -> str:
    gm = build(lambda call, value: sampled(call, value, **options))
    _, places = run(gm, PATTERN)
    assert count(gm, JOESTAR.rowwise_sample.default) == 1
    (place,) = places
    assert not place.fired
    return place.detail


def test_fires_on_the_graph_that_the_refusals_vary(monkeypatch):
    monkeypatch.setattr("joestar.fusion.table.verify_changed", lambda *_, **__: None)  # its values are made up
    gm = build(sampled)
    (record,), _ = run(gm, PATTERN)
    assert record.rewrites == 1


def test_must_not_fire():
    assert refusal(reader=True) == "the slice is read by another operation as well"
    assert refusal(indptr=0, indices=1) == "indptr and indices come from different slices"
    assert refusal(other_ids=True) == "rows are hashed under other ids than the sliced destinations"


def test_must_not_fire_on_other_matrices():
    def write(call, value):
        indptr, indices, ids, key = (value(name) for name in ("indptr", "indices", "ids", "key"))
        sample = call(JOESTAR.rowwise_sample.default, indptr, indices, ids, 2, False, key, 0, 9)
        return call(operator.getitem, sample, 1)

    _, (place,) = run(build(write), PATTERN)
    assert place.detail == "the sampled matrix is not a slice of columns"
