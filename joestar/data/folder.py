"""The converted form of a graph: a folder of ``.npy`` files and ``meta.json``, memory-mapped on loading."""

import itertools
import json
import os
import shutil
import uuid
from pathlib import Path

import numpy as np
import torch

from joestar.data.splits import PARTS
from joestar.errors import DataError, GraphError
from joestar.graph_api import Graph, NodeMapping
from joestar.graph_api.arrays import from_array

VERSION = 1
META = "meta.json"
MAP_FROM = 1 << 20
"""Files of at least this many bytes are mapped; smaller ones are read."""
ATTRIBUTES = ("name", "num_classes", "multilabel", "class_names")
MAPPING = ("mapping", "mapping_text", "mapping_offsets")
"""Raw ids of the nodes: integers; or the bytes of all texts in UTF-8, and where each begins."""


def save(graph: Graph, folder: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Writes a graph with its data and splits; ``joestar.load(folder)`` maps it back without reading it.

    Everything is written into a temporary folder beside ``folder`` and renamed at the end: other processes see the
    complete folder or none.

    Args:
        overwrite: replace an existing converted folder.

    Returns:
        The folder.

    Raises:
        DataError: ``folder`` exists, or cannot be written.
    """
    target = Path(folder).expanduser()
    if target.exists() and not (overwrite and (target / META).is_file()):
        hint = "it is no converted graph, so it is left alone" if overwrite else "pass overwrite=True to replace it"
        raise DataError(f"{target} exists already; {hint}, or choose another folder.")
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        temporary.mkdir(parents=True)
        arrays = {key: _write(temporary, key, tensor) for key, tensor in _tensors(graph).items()}
        meta = {
            "format": "joestar-graph",
            "version": VERSION,
            **{name: getattr(graph, name) for name in ATTRIBUTES},
            "arrays": arrays,
        }
        (temporary / META).write_text(json.dumps(meta, indent=1) + "\n")
        _move(temporary, target)
    except OSError as error:
        raise DataError(f"{target}: cannot write the graph ({error}). Is there space, and permission?") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def is_converted(folder: Path) -> bool:
    """True if ``folder`` was written by ``save``."""
    return (folder / META).is_file()


def read_folder(folder: Path) -> Graph:
    """Maps a folder written by ``save``.

    Large tensors are read-only maps of the files: move or clone them before writing to them in place.

    Raises:
        DataError: the folder is of another version, or its files do not agree with ``meta.json``.
    """
    meta = _read_meta(folder)
    tensors = {key: _read(folder, key, entry) for key, entry in meta["arrays"].items()}
    missing = [key for key in ("indptr", "indices") if key not in tensors]
    if missing:
        raise DataError(f"{folder / META}: the array {missing[0]!r} is missing. Write the folder again.")
    data = {
        kind: {key.removeprefix(f"{kind}."): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}
        for kind in ("ndata", "edata")
    }
    try:
        graph = Graph.from_csc(tensors["indptr"], tensors["indices"], **data)
    except GraphError as error:
        raise DataError(f"{folder}: {error} Write the folder again.") from error
    for attribute in ATTRIBUTES:
        setattr(graph, attribute, meta.get(attribute))
    graph.mapping = _mapping(tensors)
    for part in PARTS:
        setattr(graph, f"{part}_idx", tensors.get(f"{part}_idx"))
    return graph


def _tensors(graph: Graph) -> dict[str, torch.Tensor]:
    tensors = {"indptr": graph.indptr, "indices": graph.indices}
    tensors |= {f"ndata.{key}": value for key, value in graph.ndata.items()}
    tensors |= {f"edata.{key}": value for key, value in graph.edata.items()}
    splits = {f"{part}_idx": getattr(graph, f"{part}_idx") for part in PARTS}
    return tensors | {key: ids for key, ids in splits.items() if ids is not None} | _mapping_arrays(graph.mapping)


def _mapping_arrays(mapping: NodeMapping | None) -> dict[str, torch.Tensor]:
    if mapping is None:
        return {}
    if mapping.is_integer:
        return {"mapping": from_array(mapping.raw, "mapping")}
    other = next((raw for raw in mapping.raw.tolist() if not isinstance(raw, str)), None)
    if other is not None:
        raise DataError(
            f"the raw ids of graph.mapping must be integers or text to be saved; got {other!r}. Make text of them, "
            "graph.mapping = NodeMapping(numpy.array(list(map(str, graph.mapping.raw)), dtype=object)), or set it to "
            "None."
        )
    texts = [text.encode() for text in mapping.raw.tolist()]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)]).astype(np.int64)
    joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
    return {"mapping_text": from_array(joined.copy(), "text"), "mapping_offsets": torch.from_numpy(offsets)}


def _mapping(tensors: dict[str, torch.Tensor]) -> NodeMapping | None:
    whole, text, offsets = (tensors.get(key) for key in MAPPING)
    if whole is not None:
        return NodeMapping(whole.numpy())
    if text is None or offsets is None:
        return None
    joined, ends = text.numpy().tobytes(), offsets.tolist()
    texts = [joined[a:b].decode() for a, b in itertools.pairwise(ends)]
    return NodeMapping(np.array(texts, dtype=object))


def _write(folder: Path, key: str, tensor: torch.Tensor) -> dict:
    """Writes one array; NumPy has no bfloat16, so its bits are stored as int16."""
    if not key.replace("_", "").replace(".", "").replace("-", "").isalnum():
        raise DataError(f"the name {key!r} cannot be a file name; use letters, digits, '_', '-' and '.'.")
    stored = tensor.detach().cpu()
    stored = stored.view(torch.int16) if stored.dtype == torch.bfloat16 else stored
    np.save(folder / f"{key}.npy", stored.contiguous().numpy(), allow_pickle=False)
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _read(folder: Path, key: str, entry: dict) -> torch.Tensor:
    path = folder / f"{key}.npy"
    try:
        mapped = path.stat().st_size >= MAP_FROM
        tensor = from_array(np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False), key)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: expected the array {key!r}, but it cannot be read ({error}).") from error
    if entry["dtype"] == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    came = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if came != entry:
        raise DataError(f"{path}: meta.json says {entry}, but the file holds {came}. Write the folder again.")
    return tensor


def _read_meta(folder: Path) -> dict:
    path = folder / META
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, but it cannot be read ({error}). Write the folder again.") from error
    if not isinstance(meta, dict) or meta.get("format") != "joestar-graph" or meta.get("version") != VERSION:
        raise DataError(f"{path}: expected a Joestar graph of version {VERSION}. Write the folder again with this one.")
    absent = {"name", "num_classes", "multilabel", "arrays"} - meta.keys()
    if absent:
        raise DataError(f"{path}: the key {sorted(absent)[0]!r} is missing. Write the folder again.")
    return meta


def _move(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = temporary.with_suffix(".old")
    target.rename(old)
    try:
        temporary.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
