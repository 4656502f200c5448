"""What a graph is, column by column: by this a run that goes on, or a saved model, knows its data again."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from joestar.data.attributes import plain_attributes
from joestar.graph_api import Graph

READER = 1
"""To be raised when a loader makes something else of the same files: identities of two readers are not compared."""
PIECE, MOST = 1 << 20, 1 << 10
"""Bytes that are hashed at a time, and pieces of a column: of one beyond 1 GiB they are spread evenly."""
WORDS = {
    "structure": "edges", "ndata x": "features", "ndata y": "labels", "train": "training nodes",
    "val": "validation nodes", "test": "test nodes", "names": "names of classes or features",
}  # fmt: skip
_FLOATING = "~"


def identity_of(graph: Graph) -> dict[str, str]:
    """A hash of the edges, of every column of nodes and edges, of every split, of ``ids`` and of names: of dtype, shape
    and bytes; and the number of the reader.

    Of a column beyond 1 GiB 1,024 pieces of 1 MiB are read, its first and last ones among them. To be made of a graph
    as it was loaded: ``joestar.compile`` gives columns the dtypes that it wants.
    """
    columns = {"structure": [graph.indptr, graph.indices], "ids": [graph.ids]}
    for kind in ("ndata", "edata"):
        columns |= {f"{kind} {name}": [value] for name, value in getattr(graph, kind).items()}
    columns |= {split: [getattr(graph, f"{split}_idx")] for split in ("train", "val", "test")}
    names = {key: value for key, value in plain_attributes(graph).items() if key != "name"}
    found = {"reader": str(READER), "names": _digest(np.frombuffer(json.dumps(names).encode(), np.uint8)).hex()}
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4)) as pool:
        return found | {name: _hash(parts, pool) for name, parts in columns.items() if parts[0] is not None}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]] | None:
    """What differs between two identities, in words: (columns of integers, edges, splits and names; columns of floating
    point, whose last digits another machine may compute otherwise). ``None`` if they cannot be compared."""
    if not before or before.get("reader") != now.get("reader"):
        return None
    exact, floating = [], []
    for name in dict.fromkeys((*before, *now)):
        kept, came = before.get(name), now.get(name)
        if kept != came:
            close = kept is not None and came is not None and kept[:1] == came[:1] == _FLOATING
            (floating if close else exact).append(WORDS.get(name, repr(name)))
    return exact, floating


def _hash(parts: list[Tensor], pool: ThreadPoolExecutor) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for tensor in parts:
        whole.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().contiguous()
        held = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one number may have any stride
        count = -(-held.numel() // PIECE)
        pieces = np.unique(np.linspace(0, count - 1, min(count, MOST)).round().astype(np.int64)) if count else ()
        starts = [int(piece) * PIECE for piece in pieces]
        for digest in pool.map(lambda start, held=held: _digest(held[start : start + PIECE].cpu().numpy()), starts):
            whole.update(digest)
    return (_FLOATING if parts[0].is_floating_point() else "") + whole.hexdigest()


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=16).digest()
