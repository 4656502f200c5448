"""Files with any bytes changed, or cut anywhere: they are read, or refused in a sentence."""

import contextlib
import json
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import joestar
from joestar.cli.info import facts_of, print_table
from joestar.data.archive import Archive
from joestar.data.convert import convert
from joestar.errors import DataError, JoestarError
from joestar.graph_api import NodeMapping

from .converting import QUIET

ROUNDS = 150


def archive(path, write=np.savez_compressed):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(50, 4)), np.arange(50) % 3
    write(path / "g.npz", edge_index=random.integers(0, 50, (2, 300)), x=x, y=y, symmetric=1)
    return path / "g.npz"


def features(path):
    np.save(path / "x.npy", np.random.default_rng(0).normal(size=(50, 4)))
    return path / "x.npy"


FORMS = {
    "archive": (archive, lambda path: joestar.load(path, verbose=False)),
    "stored archive": (lambda path: archive(path, np.savez), lambda path: joestar.load(path, verbose=False)),
    "converted archive": (archive, lambda path: convert(path, path.parent / "out", overwrite=True, **QUIET)),
    "features": (
        features,
        lambda path: joestar.load({"source": range(50), "target": range(50)}, features=path, verbose=False),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [True, False])
def test_any_damage(tmp_path, form, cut):
    """Of packed archives errors of ``zlib``, ``zipfile`` and ``tokenize`` came up."""
    write, read = FORMS[form]
    path = write(tmp_path)
    whole, random = path.read_bytes(), np.random.default_rng(len(form))
    refused = 0
    for _ in range(ROUNDS if "converted" not in form else ROUNDS // 5):
        content = bytearray(whole[: random.integers(len(whole))] if cut else whole)
        places = [] if cut else random.integers(len(whole), size=random.choice([1, 3, 30]))
        for place in places:
            content[place] = random.integers(256)
        path.write_bytes(content)
        try:
            read(path)
        except JoestarError:
            refused += 1
    assert refused


def npy(shape, dtype="<f8"):
    """The bytes of an ``.npy`` file of twelve numbers whose header says something else."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + np.ones(12).tobytes()


def stored(path, content, packed):
    """An archive with such a file as its features."""
    archive(path, np.savez)
    with zipfile.ZipFile(path / "g.npz") as file:
        others = {name: file.read(name) for name in file.namelist() if name != "x.npy"}
    with zipfile.ZipFile(path / "g.npz", "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        for name, text in (others | {"x.npy": content}).items():
            file.writestr(name, text)
    return path / "g.npz"


def folder_of(path, content):
    (path / "source").mkdir()
    (path / "source" / "features.npy").write_bytes(content)
    np.save(path / "source" / "edges.npy", np.array([[0, 1], [1, 2]]))
    return path / "source"


def converted_folder(path, content):
    folder = saved(path / "graph")
    (folder / "ndata.x.npy").write_bytes(content)
    change(folder, len(content), "arrays", "ndata.x", "bytes")
    return folder


def in_file(path, content):
    (path / "x.npy").write_bytes(content)
    return path / "x.npy"


READERS = {
    "features": lambda path, content: FORMS["features"][1](in_file(path, content)),
    "archive": lambda path, content: joestar.load(stored(path, content, packed=False), verbose=False),
    "packed archive": lambda path, content: joestar.load(stored(path, content, packed=True), verbose=False),
    "key of an archive": lambda path, content: Archive(stored(path, content, packed=True)).read("x"),
    "converted": lambda path, content: convert(stored(path, content, packed=False), path / "out", **QUIET),
    "converted, packed": lambda path, content: convert(stored(path, content, packed=True), path / "out", **QUIET),
    "folder": lambda path, content: convert(folder_of(path, content), path / "out", **QUIET),
    "converted folder": lambda path, content: joestar.load(converted_folder(path, content)),
}
SHAPES = [
    "(900000000000000, 4)", "(9000000000000000000000, 4)", "(-3, 4)", "(3000000000, 3000000000)", "(3, 4.5)",
    "(True, 4)", "((3,), 4)", "(3, 99999999)", "(4, 4294967296, 4294967296)",
]  # fmt: skip


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_a_file_cannot_hold(tmp_path, read, shape):
    """Some raised OverflowError and TypeError; for others memory was asked for, or numbers read that are none."""
    with pytest.raises(DataError, match=r"npz|npy"):
        read(tmp_path, npy(shape))


def test_other_files_of_an_archive_are_passed_over(tmp_path):
    path = archive(tmp_path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("README.txt", "by hand")
    assert joestar.load(path, verbose=False).num_nodes == 50


def saved(path):
    """A folder with everything that ``meta.json`` speaks of."""
    graph = joestar.Graph.from_edge_index(
        [[0, 1], [1, 2]], 3, ndata={"x": torch.ones(3, 2).half(), "y": torch.tensor([0, 1, 0])}
    )
    graph.name, graph.num_classes, graph.class_names = "mine", 2, ["no", "yes"]
    graph.mapping = NodeMapping(np.array(["a", "b", "\u00e9"], dtype=object))
    return joestar.data.save(graph, path)


def change(folder, value, *keys):
    meta = json.loads((folder / "meta.json").read_text())
    place = meta
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("arrays", "ndata.x", "bytes"), "100", "the array 'ndata.x': bytes must be a whole number; got '100'"),
        (("arrays", "ndata.x", "shape"), [3, -2], "the array 'ndata.x': shape must be a list of whole numbers"),
        (("arrays", "ndata.x", "sha256"), 5, "the array 'ndata.x': sha256 must be text; got 5"),
        (("arrays", "ndata.x", "dtype"), "float32", "meta.json says .*float32.* but the file holds .*float16"),
        (("arrays", "ndata.x", "dtype"), "bfloat16", "meta.json says .*bfloat16.* but the file holds .*float16"),
        (("arrays", "ndata.y", "dtype"), "bfloat16", "meta.json says .*bfloat16.* but the file holds .*int64"),
        (("class_names",), ["no"], "class_names has 1 names, but num_classes is 2"),
        (("class_names",), "no", "class_names must be a list of text or null; got 'no'"),
        (("class_names",), [1, 2], "class_names must be a list of text or null"),
        (("num_classes",), True, "num_classes must be a whole number or null; got True"),
        (("num_classes",), 2.5, "num_classes must be a whole number or null; got 2.5"),
        (("multilabel",), "no", "multilabel must be true or false; got 'no'"),
        (("name",), 3, "name must be text or null; got 3"),
        (("in_degree",), {"min": 0}, "in_degree must be the numbers min, median, mean, max, isolated"),
        (("self_loops",), None, "self_loops must be a whole number; got None"),
        (("source",), {"generated": 3}, "source must be an object or null; got"),
        (("directed",), "yes", "directed must be true, false or null"),
        (("version",), True, "expected a version of the format from 1 to 2; got True"),
    ],
)
def test_what_a_folder_says_of_itself_is_looked_at(tmp_path, keys, value, message):
    folder = saved(tmp_path / "graph")
    change(folder, value, *keys)
    with pytest.raises(DataError, match=rf"{message}.*Write the folder again"):
        joestar.load(folder)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "bfloat16", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["min", "generated"]), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = [(key,) for key in ("format", "version", "written_by", "name", "num_classes", "multilabel", "class_names",
        "in_degree", "self_loops", "directed", "source", "arrays")]  # fmt: skip
KEYS += [("arrays", name) for name in ("indptr", "ndata.x", "mapping_text", "other")]
KEYS += [("arrays", name, part) for name in ("indices", "ndata.y") for part in ("shape", "dtype", "bytes", "sha256")]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KEYS), values)
def test_any_description(tmp_path, keys, value):
    folder = tmp_path / "graph"
    if not folder.exists():
        (tmp_path / "meta.json").write_text((saved(folder) / "meta.json").read_text())
    (folder / "meta.json").write_text((tmp_path / "meta.json").read_text())
    change(folder, value, *keys)
    with contextlib.suppress(JoestarError):
        print_table(facts_of(str(folder), None, "auto", verify=True), Console(quiet=True))


def test_ids_that_are_no_text(tmp_path):
    folder = saved(tmp_path / "graph")
    np.save(folder / "mapping_text.npy", np.frombuffer(b"ab\xff\xff", np.uint8))
    with pytest.raises(DataError, match="the raw ids of the nodes are no text"):
        joestar.load(folder)
