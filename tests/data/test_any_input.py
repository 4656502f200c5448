"""Whatever is given, there is a graph or one of Joestar's own sentences, never another library's error."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import joestar
from joestar.data import from_tables
from joestar.data.npz import KNOWN
from joestar.errors import JoestarError
from joestar.graph_api import Graph

SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
pytestmark = pytest.mark.filterwarnings("ignore::joestar.errors.JoestarWarning")

cells = st.sampled_from(
    [
        "",
        " ",
        "a",
        "b",
        "1",
        "2",
        "-1",
        "1.5",
        "nan",
        "inf",
        "1e400",
        "9" * 25,
        "id",
        "source",
        "label",
        '"',
        "train",
        "#",
    ]
) | st.text(max_size=3)
files = st.builds(
    lambda rows, mark, end: end.join(mark.join(row) for row in rows) + end,
    st.lists(st.lists(cells, min_size=1, max_size=4), max_size=6),
    st.sampled_from([",", "\t", ";", " "]),
    st.sampled_from(["\n", "\r\n"]),
)
bytes_of_files = files.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)
options = st.fixed_dictionaries(
    {},
    optional={
        "header": st.booleans(), "fill": st.just(0.0), "undirected": st.booleans(), "features": st.just([]),
        "edge_attr": st.just([]), "label": st.just(False), "weight": st.just(False), "source": st.integers(-1, 3),
        "split": st.sampled_from([(0.5, 0.5), "random", "official", "fold"]),
        "task": st.sampled_from(["classes", "regression"]),
    },
)  # fmt: skip
values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=2)
columns = st.lists(values, min_size=2, max_size=2) | hnp.arrays(
    hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=3), 2
)
frames = st.dictionaries(st.sampled_from(["source", "target", "id", "label", "f", "split"]), columns, max_size=4)


def outcome(call) -> str | None:
    """The sentence of Joestar's error, or ``None`` if the graph can be used."""
    try:
        graph = call()
    except JoestarError as error:
        return str(error)
    assert graph.num_nodes > 0 and int(graph.indptr[-1]) == graph.num_edges
    assert all(value.shape[0] == graph.num_nodes for value in graph.ndata.values())
    return None


@SETTINGS
@given(bytes_of_files, st.none() | bytes_of_files, options)
def test_any_files(tmp_path, edges, nodes, options):
    (tmp_path / "e.csv").write_bytes(edges)
    if nodes is not None:
        (tmp_path / "n.csv").write_bytes(nodes)
    given = None if nodes is None else tmp_path / "n.csv"
    outcome(lambda: from_tables(tmp_path / "e.csv", given, verbose=False, **options))


@SETTINGS
@given(frames, st.none() | frames, options)
def test_any_frames(edges, nodes, options):
    outcome(lambda: from_tables(edges, nodes, verbose=False, **options))


arrays = hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(max_dims=3, min_side=0, max_side=4)) | st.sampled_from(
    [
        np.array([[0, 1], [1, 2]]),
        np.arange(3),
        np.ones((3, 2)),
        np.array([0.5, 1, np.nan]),
        np.uint8(1),
        np.zeros((3, 1)),
    ]
)


@SETTINGS
@given(
    st.dictionaries(
        st.sampled_from(sorted(KNOWN | {"other"})),
        arrays,
    ),
    st.booleans(),
)
def test_any_archive(tmp_path, arrays, sound):
    if sound:
        arrays = {"edge_index": np.array([[0, 1], [1, 2]]), "y": np.array([0, 1, 0])} | arrays
    np.savez(tmp_path / "g.npz", **arrays)
    outcome(lambda: joestar.load(tmp_path / "g.npz", verbose=False))


@SETTINGS
@given(
    arrays | st.lists(st.lists(st.integers() | st.text(max_size=1), max_size=3), max_size=3),
    st.none() | st.integers(-1, 5),
    arrays,
)
def test_any_edge_index(edge_index, num_nodes, x):
    outcome(lambda: Graph.from_edge_index(edge_index, num_nodes, {"x": x}))


@SETTINGS
@given(values | arrays | st.lists(values) | st.dictionaries(st.text(max_size=2), values))
def test_load_of_any_thing(thing):
    if isinstance(thing, str):
        thing = f"no such {thing}".replace("\0", "")
    assert outcome(lambda: joestar.load(thing, verbose=False))
