"""Columns of features that float32 tells little of: what comes out is what float64 gives."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import joestar
from joestar.data import standardise
from joestar.data.standardise import standardised
from joestar.errors import DataError


def exact(column):
    """The column by whole numbers alone."""
    values = [Fraction(float(value)) for value in column]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    return [float(value - mean) / math.sqrt(variance) if variance else 0.0 for value in values]


@pytest.mark.parametrize("piece", [4 * 999, 1 << 20])
def test_years_times_and_constants(tmp_path, monkeypatch, piece):
    """Means in float32 were off, and constants that it rounds did not become 0."""
    monkeypatch.setattr(standardise, "PIECE", piece)
    random, nodes = np.random.default_rng(0), 50_000
    year, time = 2015.0 + random.integers(0, 8, nodes), 1.6e9 + 86400 * random.normal(size=nodes)
    x = np.stack([year, np.full(nodes, 0.1), time, np.full(nodes, -1.7e9)], axis=1)
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0, 1], [1, 2]]), x=x, y=np.arange(nodes) % 2)
    found = joestar.load(tmp_path / "g.npz", verbose=False).ndata["x"].numpy()
    assert found.dtype == np.float32
    wide = x.astype(np.longdouble)
    expected = (wide - wide.mean(0)) / np.where([True, False, True, False], wide.std(0), np.inf)
    np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-6, atol=1e-6)


near = st.builds(lambda middle, steps: [middle + step for step in steps],
                 st.sampled_from([0.0, 0.1, 2015.0, -1.6e9, 1e12]),
                 st.lists(st.integers(-50, 50), min_size=1, max_size=30))  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(near, st.sampled_from(["float32", "float64", "int64", ">f8", "longdouble"]), st.integers(1, 40))
def test_any_column_is_as_whole_numbers_have_it(column, dtype, piece):
    x = np.array(column).astype(dtype).reshape(-1, 1)
    before, standardise.PIECE = standardise.PIECE, piece
    try:
        found = standardised(x, "here")
    finally:
        standardise.PIECE = before
    np.testing.assert_allclose(found[:, 0], exact(x[:, 0]), rtol=1e-5, atol=1e-6)


def test_what_rounding_left_is_a_constant():
    x = np.array([[0.3, 0.25, 1 << 60], [0.1 + 0.2, 0.25, (1 << 60) + 1]])
    assert not standardised(x, "here").any()
    assert standardised(np.array([[False], [True]]), "here").tolist() == [[-1], [1]]
    assert standardised(np.empty((0, 3)), "here").shape == (0, 3)


@pytest.mark.parametrize("dtype", ["float64", "longdouble"])
def test_numbers_beyond_float32_are_named(monkeypatch, dtype):
    monkeypatch.setattr(standardise, "PIECE", 4)
    x = np.ones((9, 2), dtype)
    x[7, 1] = -1e39
    with pytest.raises(DataError, match=r"here: features holds -1e\+39 at \[7, 1\], beyond float32"):
        standardised(x, "here")
