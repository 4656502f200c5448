"""Planted graphs on disk: the same for any memory and device, of the right shape, and hard for features alone."""

import dataclasses
import importlib
import json
import resource
import signal
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import joestar
from joestar.data.draws import Counted, Permutation
from joestar.data.generate import DTYPES, Planted, generate, in_memory
from joestar.data.planted import HINT, MIXED, SHAPES, Shape, communities_classes, features_of, shape_of
from joestar.data.planted import signal as signal_of
from joestar.errors import ConfigError, DataError

module = importlib.import_module("joestar.data.generate")  # `joestar.data.generate` is the function
SMALL = Shape(500, 6.0, 0.9, 20, 0.75, 1.5, 7, 4, 100, 50, 60)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1))
def test_permutations_are_bijections(size, key):
    order = Permutation(size, key)
    ids = torch.arange(size)
    there = order(ids)
    assert torch.equal(there.sort()[0], ids)
    assert torch.equal(order.inverse(there), ids)


def test_permutations_scatter_neighbours_and_differ():
    order = Counted(0, "cpu").permutation("ids", 100_000)
    there = order(torch.arange(100_000)).double()
    assert float((there[1:] - there[:-1]).abs().mean()) == pytest.approx(100_000 / 3, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([there, torch.arange(100_000.0).double()]))[0, 1])) < 0.02
    other = Counted(1, "cpu").permutation("ids", 100_000)(torch.arange(100_000)).double()
    assert float((there == other).double().mean()) < 0.001


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 40), st.integers(1, 300), st.integers(0, 200))
def test_numbers_do_not_depend_on_the_piece(first, count, before):
    draws = Counted(3, "cpu")
    lead = min(before, first)
    for make in (
        lambda a, n: draws.bits("near", a, n),
        lambda a, n: draws.uniform("far", a, n, torch.float64),
        lambda a, n: draws.normal("noise", a, n),
        lambda a, n: draws.degrees(a, n, 10.0, 0.9),
    ):
        assert torch.equal(make(first, count), make(first - lead, count + lead)[lead:])


def test_numbers_have_their_distributions():
    draws, many = Counted(0, "cpu"), 200_000
    uniform, normal = draws.uniform("near", 0, many), draws.normal("noise", 0, many)
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    counts = torch.histc(uniform, 50, 0, 1)
    assert float(((counts - many / 50) ** 2 / (many / 50)).sum()) < 100, "chi square of 49 degrees of freedom"
    assert float(normal.mean()) == pytest.approx(0, abs=0.01) and float(normal.std()) == pytest.approx(1, abs=0.01)
    pairs = torch.stack([normal[:-1], normal[1:], draws.normal("mixed", 0, many)[1:]])
    assert float((torch.corrcoef(pairs) - torch.eye(3)).abs().max()) < 0.01
    degrees = draws.degrees(0, many, 29.1, 1.03).double()
    assert float(degrees.mean()) == pytest.approx(29.1, rel=0.02) and float(degrees.min()) >= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_folder_is_the_graph_in_memory_however_small_the_pieces(tmp_path, monkeypatch, dtype):
    folder = generate(SMALL, tmp_path / "whole", dtype=dtype)
    graph, expected = joestar.load(folder, verify=True), in_memory(Planted(SMALL), DTYPES[dtype])
    for one, other in ((graph.indptr, expected.indptr), (graph.indices, expected.indices)):
        assert torch.equal(one, other)
    assert graph.ndata["x"].dtype == DTYPES[dtype] and torch.equal(graph.ndata["x"], expected.ndata["x"])
    assert torch.equal(graph.ndata["y"], expected.ndata["y"])
    splits = [getattr(graph, f"{part}_idx") for part in ("train", "val", "test")]
    assert [len(ids) for ids in splits] == [100, 50, 60] and torch.cat(splits).unique().numel() == 210
    assert (graph.num_classes, graph.name) == (4, "planted planted, ids shuffled")
    monkeypatch.setitem(module.AT_MOST, "cpu", 53)
    assert contents(generate(SMALL, tmp_path / "pieces", dtype=dtype)) == contents(folder)
    assert (
        contents(generate(SMALL, tmp_path / "other", dtype=dtype, seed=1))["ndata.x.npy"]
        != contents(folder)["ndata.x.npy"]
    )


def test_ids_are_shuffled_unless_asked_otherwise(tmp_path):
    def near(graph):
        src, dst, _ = graph.coo()
        return float((src.long() // SMALL.community == dst.long() // SMALL.community).double().mean())

    assert near(in_memory(Planted(SMALL))) < 0.15
    assert near(in_memory(Planted(SMALL, shuffled=False))) == pytest.approx(SMALL.inside, abs=0.05)
    folder = generate(SMALL, tmp_path / "graph", shuffled=False)
    assert near(joestar.load(folder)) == pytest.approx(SMALL.inside, abs=0.05)


def test_shapes_are_those_of_the_datasets():
    assert {"tiny", "mini", "products", "papers100M", "mag240m-c"} <= set(SHAPES)
    assert SHAPES["papers100M"].nodes * SHAPES["papers100M"].degree == pytest.approx(2 * 1_615_685_872, rel=0.01)
    assert SHAPES["mag240m-c"].nodes * SHAPES["mag240m-c"].degree == pytest.approx(2 * 1_297_748_926, rel=0.01)
    for shape in SHAPES.values():
        assert shape.train + shape.val + shape.test <= shape.nodes
        assert (1 - shape.mixed) * shape.hint + shape.mixed / shape.classes < 0.45, "what features alone can tell"
        assert 0.75 < 1 - shape.mixed + shape.mixed / shape.classes < 0.905, "what can be told at all"
    name, quarter = shape_of("mag240m-c", 0.25)
    assert (name, quarter.nodes, quarter.train) == ("mag240m-c x 0.25", 30_437_916, 278_098)
    assert (quarter.degree, quarter.features) == (21.3, 768)


def test_features_hint_at_the_class_as_often_as_they_should():
    shape = dataclasses.replace(SHAPES["mini"], nodes=20_000, train=100)
    graph = Planted(shape)
    classes, x = graph.classes(0, 20_000), graph.features(0, 20_000, torch.float32)
    nearest = torch.cdist(x, graph.centres).argmin(1)
    assert float((nearest == classes).double().mean()) == pytest.approx(HINT, abs=0.03)
    changed = float((graph.labels(0, 20_000) != classes).double().mean())
    assert changed == pytest.approx(MIXED * (1 - 1 / shape.classes), abs=0.01)
    assert signal_of(172) > signal_of(47) > signal_of(5)


@pytest.mark.parametrize("scale", [1.0, 0.01, 0.001])
@pytest.mark.parametrize("name", ["mini", "products", "papers100M", "mag240m-c"])
def test_features_hint_as_often_at_every_scale(name, scale):
    """Small copies have fewer communities, so perhaps fewer classes: centres are as far apart as those need."""
    shape = SHAPES[name]
    nodes = max(12 * shape.community, int(shape.nodes * scale))
    shape = dataclasses.replace(shape, nodes=nodes, train=10, val=0, test=0)
    graph, some = Planted(shape), min(4000, nodes)
    there = torch.arange(min(shape.classes, -(-nodes // shape.community)))
    ids = torch.arange(0, nodes, max(1, nodes // some))[:some]
    classes = communities_classes(graph.places(ids), shape)
    assert torch.equal(classes.unique(), there)
    x = features_of(classes, 0, shape, graph.centres, graph.draws)
    nearest = torch.cdist(x, graph.centres[there]).argmin(1)
    assert float((nearest == classes).double().mean()) == pytest.approx(max(shape.hint, 1 / len(there)), abs=0.045)


def accuracies(graph, sage, epochs, hidden=64):
    """Test accuracies of a plain two-layer model in full batches: an MLP, or SAGE with the mean of all neighbours."""
    torch.manual_seed(0)
    dst = torch.repeat_interleave(torch.arange(graph.num_nodes), graph.in_degrees())
    src, degrees = graph.indices.long(), graph.in_degrees()[:, None].float()
    x, y = graph.ndata["x"], graph.ndata["y"]

    def mean(h):
        return torch.zeros_like(h).index_add_(0, dst, h[src]) / degrees

    width = 2 if sage else 1
    first = torch.nn.Linear(width * x.shape[1], hidden)
    second = torch.nn.Linear(width * hidden, graph.num_classes)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01, weight_decay=1e-3)
    given = torch.cat([x, mean(x)], 1) if sage else x

    def logits(training):
        h = F.dropout(first(given).relu(), 0.5, training)
        return second(torch.cat([h, mean(h)], 1) if sage else h)

    for _ in range(epochs):
        loss = F.cross_entropy(logits(True)[graph.train_idx], y[graph.train_idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = logits(False).argmax(1) == y
    return float(right[graph.test_idx].float().mean())


def test_features_are_not_enough_and_neighbours_are():
    graph = in_memory(Planted(SHAPES["tiny"]))
    assert accuracies(graph, False, 100) < 0.45
    assert 0.75 <= accuracies(graph, True, 100) <= 0.90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini", "products", "papers100M", "mag240m-c"])
def test_features_are_not_enough_and_neighbours_are_at_every_shape(name):
    """Of fewer nodes, classes and features, which keep degrees, hubs and the share of neighbours of one's own kind."""
    shape, fewer = SHAPES[name], {"nodes": 32_768, "classes": 20, "features": 64, "train": 12_000, "test": 6_000}
    shape = dataclasses.replace(shape, **fewer, val=1_000, community=min(512, shape.community))
    graph = in_memory(Planted(shape))
    assert accuracies(graph, False, 40) < 0.45
    assert 0.75 <= accuracies(graph, True, 50) <= 0.90


def test_memory_stays_under_the_limit(tmp_path, monkeypatch):
    monkeypatch.setitem(module.AT_MOST, "cpu", 1 << 30)
    seen = []
    for name in ("features", "sources"):
        make = getattr(Planted, name)

        def spy(*arguments, make=make):
            made = make(*arguments)
            seen.append(made.numel())
            return made

        monkeypatch.setattr(Planted, name, spy)
    shape = dataclasses.replace(SMALL, nodes=60_000, features=32)
    tracemalloc.start()
    try:
        generate(shape, tmp_path / "graph", memory="16MiB")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert len(seen) > 6 and max(seen) <= 1.1 * (16 << 20) // 40


def test_what_was_killed_is_cleared_away_and_two_do_not_meet(tmp_path):
    partial = tmp_path / "graph.partial-generate"
    partial.mkdir()
    (partial / "ndata.old.npy").write_bytes(b"left")
    refused = []

    def progress(what, done, total):
        if not refused:
            with pytest.raises(DataError, match="another process is writing the same graph here") as error:
                generate(SMALL, tmp_path / "graph")
            refused.append(error)

    folder = generate(SMALL, tmp_path / "graph", progress=progress)
    assert refused and not partial.exists() and not (folder / "ndata.old.npy").exists()
    assert joestar.load(folder, verify=True).num_nodes == 500


def test_a_full_disk_leaves_nothing(tmp_path):
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot write the graph"):
            generate(SMALL, tmp_path / "graph")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shape": "huge"}, ConfigError, "unknown shape 'huge': choose one of tiny, mini"),
        ({"scale": 0}, ConfigError, "scale must be a finite number above 0"),
        ({"scale": float("inf")}, ConfigError, "scale must be a finite number above 0; got inf"),
        ({"scale": float("nan")}, ConfigError, "scale must be a finite number above 0; got nan"),
        ({"scale": 0.001}, ConfigError, "scale 0.001 leaves 2 nodes and 0 training nodes of the shape 'tiny'"),
        ({"shape": "papers100M", "scale": 100}, ConfigError, "ids are int32"),
        ({"dtype": "int8"}, ConfigError, "dtype must be one of fp32, fp16, bf16; got 'int8'"),
        ({"memory": "a lot"}, DataError, "memory must be an amount such as '4GiB'"),
        ({"memory": "1KiB"}, DataError, "memory='1KiB' is too little to work in: give at least 16MiB"),
        ({"device": "abacus"}, ConfigError, "device must be cpu or cuda; got 'abacus'"),
        ({"device": "meta"}, ConfigError, "device must be cpu or cuda; got 'meta'"),
        ({"device": torch.device("xpu")}, ConfigError, "device must be cpu or cuda"),
        ({"seed": -1}, ConfigError, "seed must be a whole number from 0 to 18,446,744,073,709,551,615; got -1"),
        ({"seed": 2**64}, ConfigError, "seed must be a whole number from 0 to 18,446"),
        ({"seed": 1.5}, ConfigError, "seed must be a whole number .*; got 1.5"),
    ],
)
def test_wrong_wishes(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        generate(**{"shape": "tiny", "folder": tmp_path / "graph"} | arguments)
    assert not list(tmp_path.iterdir())


def test_meta_says_where_the_graph_is_from(tmp_path):
    meta = json.loads((generate("tiny", tmp_path / "graph", seed=5) / "meta.json").read_text())
    assert meta["source"] == {"generated": {"shape": "tiny", "seed": 5, "ids": "shuffled", "dtype": "fp32"}}
    assert meta["directed"] is True and meta["written_by"] == f"joestar {joestar.__version__}"
    graph = joestar.load(tmp_path / "graph")
    assert meta["in_degree"]["max"] == int(graph.in_degrees().max())
    assert meta["self_loops"] == int((graph.indices == graph.coo()[1]).sum())
    assert np.isclose(meta["in_degree"]["mean"], graph.num_edges / graph.num_nodes)
