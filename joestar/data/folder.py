"""The converted form of a graph: a folder of ``.npy`` files and ``meta.json``, memory-mapped on loading.

``joestar.data.save``, ``joestar generate`` and ``joestar convert`` write the same folder. ``indptr.npy`` and
``indices.npy`` are the structure; ``ndata.x.npy``, ``edata.w.npy`` and so on the data; ``train_idx.npy`` and so on
the splits; ``mapping*.npy`` the raw ids. bfloat16 is stored as int16 of the same bits. ``meta.json`` has the version of
the format, shapes, dtypes, sizes and checksums (``joestar.data.checksums``) of the files, what the graph is called,
whether it is directed, where it is from, and its degrees.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from joestar.data.archive import DAMAGED, check_npy
from joestar.data.attributes import plain_attributes, text_of
from joestar.data.checksums import checksum
from joestar.data.degrees import degree_facts
from joestar.data.folder_meta import AGAIN, ATTRIBUTES, is_converted, read_meta
from joestar.data.folder_writer import FolderWriter, check_key, full
from joestar.data.splits import PARTS
from joestar.errors import DataError, GraphError
from joestar.graph_api import Graph, NodeMapping
from joestar.graph_api.arrays import from_array

__all__ = ["is_converted", "read_folder", "save", "verify_folder"]

MAP_FROM = 1 << 20
"""Files of at least this many bytes are mapped; smaller ones are read."""
LOOK_AT = 16 << 20
"""Edges up to which the structure is looked through on opening, which takes a moment."""
MAPPING = ("mapping", "mapping_text", "mapping_offsets")
"""Raw ids of the nodes: integers; or the bytes of all texts in UTF-8, and where each begins."""


def save(graph: Graph, folder: str | os.PathLike, *, overwrite: bool = False) -> Path:
    """Writes a graph with its data and splits; ``joestar.load(folder)`` maps it back without reading it.

    Everything is written into a folder ``NAME.partial-...`` beside ``folder`` and renamed at the end: other processes
    see the complete folder or none.

    Args:
        overwrite: replace a converted folder in which nothing else lies.

    Returns:
        The folder.

    Raises:
        DataError: ``folder`` exists, or cannot be written; the graph holds what files do not.
    """
    target = Path(folder).expanduser()
    tensors, attributes = _tensors(graph), plain_attributes(graph)
    for key in tensors:
        check_key(key)
    writer = None
    try:
        writer = FolderWriter(target, overwrite=overwrite)
        for key, tensor in tensors.items():
            _write(writer, key, tensor)
        indptr, indices = (writer.folder / f"{key}.npy" for key in ("indptr", "indices"))
        degrees = degree_facts(np.load(indptr, mmap_mode="r"), np.load(indices, mmap_mode="r"))
        writer.finish(**attributes, **degrees, directed=None, source=None)
    except OSError as error:
        raise full(target, error) from error
    finally:
        if writer is not None:
            writer.discard()
    return target


def verify_folder(folder: Path) -> dict[str, Any]:
    """Reads every file and compares it with its checksum; ``meta.json``.

    Raises:
        DataError: a file is not what was written, or the folder is so old that it has no checksums.
    """
    meta = read_meta(folder)
    for key, entry in meta["arrays"].items():
        path = folder / f"{key}.npy"
        if "sha256" not in entry:
            raise DataError(f"{folder}: it was written without checksums (version {meta['version']}). {AGAIN}")
        if checksum(path) != entry["sha256"]:
            raise DataError(f"{path}: its checksum is not that of meta.json: the file was changed or damaged. {AGAIN}")
    return meta


def read_folder(folder: Path, *, verify: bool = False) -> Graph:
    """Maps a folder; nothing large is read.

    Large tensors are maps of the files. What is written to them in place is in memory alone: files stay as they are.
    (Where the system maps a file larger than memory only for reading, writing to it ends the process.)

    Args:
        verify: compare checksums, and look through the structure, whatever its size.

    Raises:
        DataError: the folder is half-written, foreign or of a newer version, or its files do not agree with
            ``meta.json``.
    """
    meta = verify_folder(folder) if verify else read_meta(folder)
    tensors = {key: _read(folder, key, entry) for key, entry in meta["arrays"].items()}
    _check_ends(folder, tensors["indptr"], tensors["indices"])
    data = {
        kind: {key.removeprefix(f"{kind}."): tensor for key, tensor in tensors.items() if key.startswith(f"{kind}.")}
        for kind in ("ndata", "edata")
    }
    look = verify or tensors["indices"].numel() <= LOOK_AT
    try:
        graph = Graph.from_csc(tensors["indptr"], tensors["indices"], **data, validate=look)
    except GraphError as error:
        raise DataError(f"{folder}: {error} {AGAIN}") from error
    for attribute in ATTRIBUTES:
        setattr(graph, attribute, meta.get(attribute))
    graph.mapping = _mapping(folder, tensors)
    graph.ids = tensors.get("ids")
    for part in PARTS:
        setattr(graph, f"{part}_idx", tensors.get(f"{part}_idx"))
    return graph


def _check_ends(folder: Path, indptr: torch.Tensor, indices: torch.Tensor) -> None:
    """The cheapest look at a structure: whether its two files belong together."""
    if indptr.dim() == indices.dim() == 1 and indptr.numel() > 1:
        ends = int(indptr[0]), int(indptr[-1])
        if ends != (0, indices.numel()):
            raise DataError(
                f"{folder}: indptr must go from 0 to the number of edges, {indices.numel()}; it goes from {ends[0]} to "
                f"{ends[1]}. {AGAIN}"
            )


def _tensors(graph: Graph) -> dict[str, torch.Tensor]:
    tensors = {"indptr": graph.indptr, "indices": graph.indices}
    if graph.ids is not None:  # what random draws and embeddings go by
        tensors["ids"] = graph.ids
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
    texts = [text_of(text, "an id of graph.mapping").encode() for text in mapping.raw.tolist()]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts], dtype=np.int64)]).astype(np.int64)
    joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
    return {"mapping_text": from_array(joined.copy(), "text"), "mapping_offsets": torch.from_numpy(offsets)}


def _mapping(folder: Path, tensors: dict[str, torch.Tensor]) -> NodeMapping | None:
    whole, text, offsets = (tensors.get(key) for key in MAPPING)
    if whole is not None:
        return NodeMapping(whole.numpy())
    if text is None or offsets is None:
        return None
    joined, ends = text.numpy().tobytes(), offsets.tolist()
    try:
        texts = [joined[a:b].decode() for a, b in itertools.pairwise(ends)]
    except UnicodeDecodeError as error:
        raise DataError(f"{folder}: the raw ids of the nodes are no text ({error}). {AGAIN}") from error
    return NodeMapping(np.array(texts, dtype=object))


def _write(writer: FolderWriter, key: str, tensor: torch.Tensor) -> None:
    """Writes one array; NumPy has no bfloat16, so its bits are stored as int16."""
    stored = tensor.detach().cpu()
    is_bf16 = stored.dtype == torch.bfloat16
    stored = stored.view(torch.int16) if is_bf16 else stored
    try:
        array = stored.contiguous().numpy()
    except TypeError:
        raise DataError(
            f"{key} is {str(tensor.dtype).removeprefix('torch.')}, which .npy files do not have: convert it, for "
            "example with .to(torch.float16)."
        ) from None
    writer.write(key, array, "bfloat16" if is_bf16 else None)


_WIDENED = ("uint16", "uint32", "uint64")
"""Dtypes that arrays of others lose where they become tensors."""


def _mapped(path: Path) -> np.ndarray:
    """A map that may be written to, in memory alone: features are normalised in place."""
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except OSError:  # more than the system lets a process have of its own
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _read(folder: Path, key: str, entry: dict) -> torch.Tensor:
    path = folder / f"{key}.npy"
    try:
        check_npy(path)
        array = _mapped(path) if path.stat().st_size >= MAP_FROM else np.load(path, allow_pickle=False)
        tensor = torch.from_numpy(array) if array.dtype.name in _WIDENED else from_array(array, key)
    except DAMAGED as error:
        raise DataError(f"{path}: expected the array {key!r}, but it cannot be read ({error}).") from error
    if entry["dtype"] == "bfloat16" and tensor.dtype == torch.int16:
        tensor = tensor.view(torch.bfloat16)
    came = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    said = {name: entry[name] for name in came}
    if came != said:
        raise DataError(f"{path}: meta.json says {said}, but the file holds {came}. {AGAIN}")
    return tensor
