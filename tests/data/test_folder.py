import hashlib
import json
import resource
import signal

import numpy as np
import pytest
import torch

import joestar.data
from joestar.cli.info import describe
from joestar.data import checksums, degrees
from joestar.data.folder_writer import FolderWriter
from joestar.errors import DataError
from joestar.graph_api import Graph, NodeMapping

from .small import SPLITS, edge_set


def make_graph(num_nodes=7):
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]])
    ndata = {
        "x": torch.randn(num_nodes, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "y": torch.arange(num_nodes) % 3,
    }
    graph = Graph.from_edge_index(edge_index, num_nodes, ndata=ndata, edata={"w": torch.rand(4)})
    graph.name, graph.num_classes = "mine", 3
    graph.train_idx, graph.val_idx, graph.test_idx = (torch.tensor(ids) for ids in SPLITS.values())
    return graph


def test_round_trip(tmp_path):
    graph = make_graph()
    folder = joestar.data.save(graph, tmp_path / "deep" / "graph")
    loaded = joestar.data.load(folder)
    assert torch.equal(loaded.indptr, graph.indptr)
    assert torch.equal(loaded.indices, graph.indices)
    assert loaded.ndata["x"].dtype == torch.bfloat16
    assert torch.equal(loaded.ndata["x"], graph.ndata["x"])
    assert torch.equal(loaded.ndata["y"], graph.ndata["y"])
    assert torch.equal(loaded.edata["w"], graph.edata["w"])
    assert (loaded.name, loaded.num_classes, loaded.multilabel) == ("mine", 3, False)
    assert torch.equal(loaded.train_idx, graph.train_idx)
    assert torch.equal(loaded.test_idx, graph.test_idx)
    assert [path.name for path in folder.parent.iterdir()] == ["graph"]
    assert joestar.data.load("graph", root=folder.parent).name == "mine"


def test_large_arrays_are_mapped_and_no_warning_is_shown(tmp_path, recwarn):
    graph = make_graph(1 << 17)
    loaded = joestar.data.load(joestar.data.save(graph, tmp_path / "graph"))
    file = (tmp_path / "graph" / "ndata.y.npy").resolve()
    with open("/proc/self/maps") as maps:
        assert str(file) in maps.read()
    assert torch.equal(loaded.ndata["y"], graph.ndata["y"])
    assert not recwarn.list


def test_split_of_a_converted_folder(tmp_path):
    graph = make_graph()
    folder = joestar.data.save(graph, tmp_path / "graph")
    order = np.random.RandomState(3).permutation(7)
    assert joestar.data.load(folder, split="random", seed=3).train_idx.tolist() == order[:4].tolist()
    graph.train_idx = graph.val_idx = graph.test_idx = None
    joestar.data.save(graph, folder, overwrite=True)
    assert joestar.data.load(folder).train_idx is not None
    with pytest.raises(DataError, match=r"it was saved without a split"):
        joestar.data.load(folder, split="official")


def test_existing_folder_is_not_touched(tmp_path):
    graph = make_graph()
    folder = joestar.data.save(graph, tmp_path / "graph")
    with pytest.raises(DataError, match=r"exists already; pass overwrite=True \(--overwrite\) to replace it"):
        joestar.data.save(graph, folder)
    graph.name = "other"
    joestar.data.save(graph, folder, overwrite=True)
    assert joestar.data.load(folder).name == "other"
    (tmp_path / "precious").mkdir()
    with pytest.raises(DataError, match=r"it is no converted graph, so it is left alone"):
        joestar.data.save(graph, tmp_path / "precious", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph", "precious"]


def test_full_disk_leaves_nothing_behind_and_keeps_the_old_folder(tmp_path):
    ndata = {"y": torch.zeros(100_000, dtype=torch.int64)}
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 100_000, ndata=ndata)
    graph.name = "first"
    joestar.data.save(graph, tmp_path / "graph")
    graph.name = "second"
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot write the graph"):
            joestar.data.save(graph, tmp_path / "graph", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]
    assert joestar.data.load(tmp_path / "graph", split="random").name == "first"


def damage_meta(**change):
    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | change))

    return damage


def damage_array(name, array):
    return lambda folder: np.save(folder / f"{name}.npy", array)


def truncate(name, by=3):
    def damage(folder):
        path = folder / f"{name}.npy"
        path.write_bytes(path.read_bytes()[:-by])

    return damage


def lengthen(name):
    return lambda folder: (folder / f"{name}.npy").open("ab").write(b"more")


def drop_checked(damage):
    """Damage to a folder whose sizes nobody noted, as version 1 did not."""

    def both(folder):
        damage(folder)
        as_version_1(folder)

    return both


def as_version_1(folder):
    meta = json.loads((folder / "meta.json").read_text())
    arrays = {key: {name: entry[name] for name in ("shape", "dtype")} for key, entry in meta["arrays"].items()}
    kept = {key: meta[key] for key in ("format", "name", "num_classes", "multilabel", "class_names")}
    (folder / "meta.json").write_text(json.dumps(kept | {"version": 1, "arrays": arrays}))


def test_folders_of_version_1_are_read(tmp_path):
    graph = make_graph()
    folder = joestar.data.save(graph, tmp_path / "graph")
    as_version_1(folder)
    assert torch.equal(joestar.load(folder).ndata["x"], graph.ndata["x"])
    with pytest.raises(DataError, match="written without checksums"):
        joestar.load(folder, verify=True)


def test_every_flipped_bit_is_found_when_asked(tmp_path):
    folder = joestar.data.save(make_graph(), tmp_path / "graph")
    joestar.load(folder, verify=True)
    meta = json.loads((folder / "meta.json").read_text())
    assert set(meta["arrays"]) == {path.stem for path in folder.glob("*.npy")}
    for key in meta["arrays"]:
        path = folder / f"{key}.npy"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(DataError, match=rf"{key}.npy: its checksum is not that of meta.json"):
            joestar.load(folder, verify=True)
        path.write_bytes(content)


def test_checksums_do_not_depend_on_how_they_are_made(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 40)
    blocks = [path.read_bytes()[i : i + 1000] for i in range(0, 10240, 1000)]
    monkeypatch.setattr(checksums, "BLOCK", 1000)
    monkeypatch.setattr(checksums, "PIECE", 300)
    expected = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks)).hexdigest()
    assert checksums.checksum(path) == expected


def test_a_folder_that_is_being_written_is_refused(tmp_path):
    folder = joestar.data.save(make_graph(), tmp_path / "graph")
    partial = folder.rename(tmp_path / "graph.partial-1234")
    with pytest.raises(DataError, match=r"graph.partial-1234: this graph is half-written"):
        joestar.load(partial)
    with pytest.raises(DataError, match=r"names with '\.partial-' are those of half-written folders"):
        joestar.data.save(make_graph(), partial)


def test_what_came_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    complete = FolderWriter.complete

    def slowly(self, **facts):
        complete(self, **facts)
        (tmp_path / "graph").mkdir()

    monkeypatch.setattr(FolderWriter, "complete", slowly)
    with pytest.raises(DataError, match="exists already"):
        joestar.data.save(make_graph(), tmp_path / "graph")
    assert not list((tmp_path / "graph").iterdir()) and len(list(tmp_path.iterdir())) == 1


def test_facts_of_degrees(monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(degrees, "PIECE", 7)
    for nodes, edges in ((1, 0), (5, 3), (40, 200), (300, 100)):
        graph = Graph.from_edge_index(torch.from_numpy(random.integers(0, nodes, (2, edges))), nodes)
        facts = degrees.degree_facts(graph.indptr.numpy(), graph.indices.numpy())
        expected = describe(graph)
        assert facts == {key: expected[key] for key in facts}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "meta.json").write_text("{"), "expected JSON, but it cannot be read"),
        (damage_meta(version=99), r"version 99 of the format, by joestar .* Update Joestar"),
        (damage_meta(version=0), "expected a version of the format from 1 to 2; got 0"),
        (damage_meta(format="other"), "this is another program's"),
        (damage_meta(arrays=[]), "expected the arrays by name; got list"),
        (damage_meta(arrays={"indptr": 3, "indices": {}}), "expected shape and dtype of the array 'indptr'; got 3"),
        (truncate("ndata.x"), r"ndata.x.npy: the file is truncated: meta.json says 170 bytes, but there are 167"),
        (lengthen("ndata.x"), r"ndata.x.npy: the file is too long"),
        (lambda folder: (folder / "journal.json").write_text("{}"), "this graph is half-written"),
        (drop_checked(damage_array("indptr", np.arange(8))), "indptr must go from 0 to the number of edges, 4"),
        (damage_meta(arrays={}), "the array 'indptr' is missing"),
        (lambda folder: (folder / "indices.npy").unlink(), "expected the array 'indices', but it cannot be read"),
        (
            drop_checked(damage_array("ndata.y", np.zeros(3))),
            r"meta.json says .*'shape': \[7\].* but the file holds .*\[3\]",
        ),
        (damage_array("indices", np.full(4, 9, dtype=np.int32)), r"is not a node.* Write the folder again"),
    ],
)
def test_damaged_folder(tmp_path, damage, message):
    folder = joestar.data.save(make_graph(), tmp_path / "graph")
    damage(folder)
    with pytest.raises(DataError, match=message):
        joestar.data.load(folder)


def test_unusable_name(tmp_path):
    graph = make_graph()
    graph.ndata["a/b"] = graph.ndata["y"]
    with pytest.raises(DataError, match=r"'ndata.a/b' cannot be a file name"):
        joestar.data.save(graph, tmp_path / "graph")
    assert not list(tmp_path.iterdir())


def test_to_symmetric(tmp_path):
    graph = make_graph()
    with pytest.raises(DataError, match=r"edge data 'w' of graph 'mine' cannot follow"):
        joestar.data.to_symmetric(graph)
    graph.edata.clear()
    made = joestar.data.to_symmetric(graph)
    undirected = {(0, 1), (1, 2), (0, 2), (3, 4)}
    assert edge_set(made) == undirected | {(v, u) for u, v in undirected}
    assert made.name == "mine"
    assert made.train_idx is graph.train_idx
    assert made.ndata["x"] is graph.ndata["x"]
    assert edge_set(joestar.data.to_symmetric(made)) == edge_set(made)


DTYPES = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.bool, torch.float16, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_any_dtype_come_back(tmp_path, dtype):
    """Those of unsigned integers were written, and refused on loading."""
    graph = make_graph()
    graph.ndata["c"], graph.edata["c"] = torch.arange(7).to(dtype), torch.arange(4).to(dtype)
    loaded = joestar.data.load(joestar.data.save(graph, tmp_path / "graph"))
    for frame, before in ((loaded.ndata, graph.ndata), (loaded.edata, graph.edata)):
        assert frame["c"].dtype == dtype and torch.equal(frame["c"], before["c"])


def test_dtypes_that_files_lack_are_named(tmp_path):
    graph = make_graph()
    graph.ndata["c"] = torch.zeros(7).to(torch.float8_e4m3fn)
    with pytest.raises(DataError, match=r"ndata\.c is float8_e4m3fn, which \.npy files do not have: convert it"):
        joestar.data.save(graph, tmp_path / "graph")
    assert not list(tmp_path.iterdir())


def test_what_random_draws_go_by_comes_back(tmp_path):
    graph = make_graph()
    graph.ids = torch.arange(7, dtype=graph.indices.dtype).flip(0)
    assert torch.equal(joestar.data.load(joestar.data.save(graph, tmp_path / "graph")).ids, graph.ids)


@pytest.mark.parametrize("part", ["train_idx", "val_idx", "test_idx"])
def test_a_split_of_one_part_is_kept(tmp_path, part):
    """It was replaced by a random one: nodes to test on were trained on."""
    graph = make_graph()
    for other in {"train_idx", "val_idx", "test_idx"} - {part}:
        setattr(graph, other, None)
    loaded = joestar.data.load(joestar.data.save(graph, tmp_path / "graph"))
    for name in ("train_idx", "val_idx", "test_idx"):
        before, after = getattr(graph, name), getattr(loaded, name)
        assert (before is None) == (after is None) and (before is None or torch.equal(before, after))


def test_mapped_data_can_be_written_to_and_files_stay(tmp_path):
    """It ended the process, without a word, from 1 MiB on."""
    graph = make_graph(1 << 17)
    folder = joestar.data.save(graph, tmp_path / "graph")
    loaded = joestar.data.load(folder)
    loaded.ndata["y"][3] = 77
    loaded.ndata["x"].mul_(2)
    loaded.ndata["y"].numpy()[4] = 78
    assert loaded.ndata["y"][2:5].tolist() == [2, 77, 78]
    again = joestar.data.load(folder, verify=True)
    assert torch.equal(again.ndata["y"], graph.ndata["y"]) and torch.equal(again.ndata["x"], graph.ndata["x"])


def test_what_may_not_be_mapped_to_be_written_to_is_mapped_to_be_read(tmp_path, monkeypatch):
    """More than the system lets a process have of its own."""
    graph, load = make_graph(1 << 17), np.load
    folder = joestar.data.save(graph, tmp_path / "graph")

    def refusing(path, mmap_mode=None, **given):
        if mmap_mode == "c":
            raise OSError("Cannot allocate memory")
        return load(path, mmap_mode=mmap_mode, **given)

    monkeypatch.setattr(np, "load", refusing)
    assert torch.equal(joestar.data.load(folder).ndata["y"], graph.ndata["y"])


@pytest.mark.parametrize(
    ("attribute", "value", "kept"),
    [
        ("num_classes", np.int64(2), 2),
        ("num_classes", torch.tensor(2), 2),
        ("class_names", np.array(["a", "b"]), ["a", "b"]),
        ("class_names", np.array(["a", "b"], dtype=object), ["a", "b"]),
        ("class_names", ("a", np.str_("b")), ["a", "b"]),
        ("class_names", np.array([3, 5]), ["3", "5"]),
        ("multilabel", np.bool_(False), False),
        ("name", np.str_("mine"), "mine"),
    ],
)
def test_numbers_and_text_of_any_kind_are_kept(tmp_path, attribute, value, kept):
    graph = make_graph()
    graph.num_classes, graph.class_names = 2, None
    setattr(graph, attribute, value)
    found = getattr(joestar.load(joestar.data.save(graph, tmp_path / "graph")), attribute)
    assert found == kept and type(found) is type(kept)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("num_classes", 2.0, r"graph.num_classes must be a whole number or None; got 2.0"),
        ("num_classes", "2", r"graph.num_classes must be a whole number"),
        ("class_names", ["a"], r"graph.class_names has 1 names, but graph.num_classes is 2"),
        ("class_names", "ab", r"graph.class_names must be a list of text"),
        ("class_names", ["a", None], r"graph.class_names must be text; got None"),
        ("class_names", ["a", "\ud800"], r"graph.class_names: .* holds half of a character"),
        ("name", "\ud800", r"graph.name: .* holds half of a character"),
        ("name", 3, r"graph.name must be text; got 3"),
        (
            "mapping",
            NodeMapping(np.array([*"abcdef", "\udfff"], dtype=object)),
            "an id of graph.mapping: .* holds half",
        ),
    ],
)
def test_what_no_file_has_is_told_before_anything_is_written(tmp_path, attribute, value, message):
    graph = make_graph()
    graph.num_classes, graph.class_names = 2, None
    setattr(graph, attribute, value)
    with pytest.raises(DataError, match=message):
        joestar.data.save(graph, tmp_path / "graph")
    assert not list(tmp_path.iterdir())
