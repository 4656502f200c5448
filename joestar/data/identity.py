"""What a graph is, column by column: by this a run that goes on, or a saved model, knows its data again."""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from joestar.graph_api import Graph

PIECE, MOST = 1 << 20, 1 << 10
"""Bytes that are hashed at a time, and pieces of a column: of one beyond 1 GiB they are spread evenly."""
WORDS = {
    "structure": "edges", "ndata x": "features", "ndata y": "labels", "train": "training nodes",
    "val": "validation nodes", "test": "test nodes",
}  # fmt: skip


def identity_of(graph: Graph) -> dict[str, str]:
    """A hash of the edges, of every column of nodes and edges, and of every split: of dtype, shape and bytes.

    Of a column beyond 1 GiB 1,024 pieces of 1 MiB are read, its first and last ones among them, so that the time is
    bounded for any graph.
    """
    columns = {"structure": [graph.indptr, graph.indices]}
    columns |= {
        f"{kind} {name}": [value] for kind in ("ndata", "edata") for name, value in getattr(graph, kind).items()
    }
    columns |= {split: [getattr(graph, f"{split}_idx")] for split in ("train", "val", "test")}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return {name: _hash(parts, pool) for name, parts in columns.items() if parts[0] is not None}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two identities, in words, in a fixed order."""
    every = [*before, *(name for name in now if name not in before)]
    return [WORDS.get(name, repr(name)) for name in every if before.get(name) != now.get(name)]


def _hash(parts: list[Tensor], pool: ThreadPoolExecutor) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for tensor in parts:
        tensor = tensor.detach().cpu().contiguous()
        whole.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        held = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        count = -(-len(held) // PIECE)
        pieces = np.unique(np.linspace(0, count - 1, min(count, MOST)).round().astype(np.int64)) if count else ()
        for digest in pool.map(lambda piece, held=held: _digest(held[piece * PIECE : (piece + 1) * PIECE]), pieces):
            whole.update(digest)
    return whole.hexdigest()


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.data, digest_size=16).digest()
