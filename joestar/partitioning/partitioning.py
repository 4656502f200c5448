"""``Partitioning``: an assignment of nodes to parts, and the file that keeps it."""

import hashlib
import json
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joestar.errors import DataError
from joestar.graph_api import Graph
from joestar.partitioning.facts import PartitionFacts, facts_of
from joestar.partitioning.files import write_beside

VERSION = 1
FORMAT = "joestar-partitioning"
UNREADABLE = (OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error)
HASHED = 1 << 24
"""Numbers per hashed piece of the structure."""


@dataclass(frozen=True)
class Partitioning:
    """Which part of a graph every node belongs to.

    Attributes:
        assignment: int32 ``[num_nodes]`` in ``[0, parts)``.
        parts: number of parts; some may be empty.
        seed: that it was made with.
        fingerprint: of the graph's structure, see ``fingerprint_of``.
        settings: how it was made; plain numbers and text.
    """

    assignment: Tensor
    parts: int
    seed: int
    fingerprint: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)

    def facts(self, graph: Graph) -> PartitionFacts:
        """Edges cut, balance, label skew and halo sizes on the graph that it was made for."""
        self.check(graph)
        return facts_of(graph, self.assignment, self.parts)

    def check(self, graph: Graph, where: str = "the partitioning") -> None:
        """Raises ``DataError`` unless it was made for this structure; reads all of it."""
        came = {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges}
        made = {key: self.fingerprint.get(key) for key in came}
        if came == made:
            came, made = fingerprint_of(graph), self.fingerprint
        if came != made:
            raise DataError(
                f"{where} was made for another graph: {_counts(self.fingerprint)}; this one has {_counts(came)}"
                f"{' but other edges, or the same in another order' if _counts(came) == _counts(made) else ''}. "
                "Make it again with joestar.partition."
            )

    def save(self, path: str | os.PathLike) -> Path:
        """Writes one ``.npz`` file, whole or not at all: beside ``path`` first, then renamed.

        Raises:
            DataError: it cannot be written.
        """
        assignment = np.ascontiguousarray(self.assignment.numpy())
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "parts": self.parts,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
        }
        meta["checksum"] = _checksum(assignment, meta)
        text = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        target = Path(path).expanduser()
        write_beside(target, lambda file: np.savez(file, assignment=assignment, meta=text))
        return target

    @classmethod
    def load(cls, path: str | os.PathLike, graph: Graph | None = None) -> "Partitioning":
        """Reads what ``save`` wrote.

        Args:
            graph: if given, that it was made for this graph is checked too.

        Raises:
            DataError: the file is missing, damaged, of another version, or of another graph.
        """
        path = Path(path).expanduser()
        assignment, meta = _read(path)
        if meta.get("format") != FORMAT:
            raise DataError(f"{path}: expected a partitioning that joestar.partition made; got another kind of file.")
        if meta.get("version") != VERSION:
            raise DataError(
                f"{path}: expected a partitioning of version {VERSION}, got {meta.get('version')!r}. Make it again "
                "with this version of Joestar."
            )
        stated = meta.pop("checksum", None)
        if stated != _checksum(assignment, meta):
            raise DataError(f"{path}: the file is damaged (its checksum differs). Make it again.")
        found = cls(torch.from_numpy(assignment), meta["parts"], meta["seed"], meta["fingerprint"], meta["settings"])
        if graph is not None:
            found.check(graph, str(path))
        return found


def fingerprint_of(graph: Graph) -> dict[str, Any]:
    """Number of nodes and edges, and a hash of ``indptr`` and ``indices`` (that of ids in int32 and int64 is equal)."""
    ids = np.int32 if graph.num_nodes < 2**31 else np.int64
    columns = ((graph.indptr.cpu().numpy(), np.int64), (graph.indices.cpu().numpy(), ids))
    pieces = [(array[i : i + HASHED], kind) for array, kind in columns for i in range(0, len(array), HASHED)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda piece: _digest(*piece), pieces)
    joined = hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()
    return {"num_nodes": graph.num_nodes, "num_edges": graph.num_edges, "structure": joined}


def _digest(array: np.ndarray, kind: type) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array, dtype=kind).data, digest_size=16).digest()


def _checksum(assignment: np.ndarray, meta: dict[str, Any]) -> str:
    """Of the assignment and of everything said about it."""
    found = hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=16)
    found.update(assignment.data)
    return found.hexdigest()


def _read(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            assignment, text = file["assignment"], file["meta"]
        meta = json.loads(text.tobytes())
        if assignment.dtype != np.int32 or assignment.ndim != 1 or not isinstance(meta, dict):
            raise ValueError(f"the assignment is {assignment.dtype} with {assignment.ndim} dimensions")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file. Write it with Partitioning.save or `joestar partition`.") from error
    except UNREADABLE as error:
        why = error if zipfile.is_zipfile(path) else "it is no .npz file"  # NumPy would have it loaded as a pickle
        raise DataError(
            f"{path}: expected a partitioning, but it cannot be read ({why}). Make it again with `joestar partition`."
        ) from error
    return assignment, meta


def _counts(fingerprint: dict[str, Any]) -> str:
    return f"{fingerprint.get('num_nodes'):,} nodes and {fingerprint.get('num_edges'):,} edges"
