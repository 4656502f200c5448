"""From edges on disk to CSC on disk in bounded memory: edges are dealt to files by destination, each file is sorted.

An edge is one int64 key, destination above source. A file that does not fit into memory is dealt again, by its own
smallest and largest key. Sorted files follow each other, so that ``indices`` and ``indptr`` are written from beginning
to end. What is written does not depend on memory or threads.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from joestar.data.edge_sources import Edges
from joestar.data.folder_writer import FolderWriter, open_to_append, write_all
from joestar.data.in_order import in_order, threads_for
from joestar.data.journal import Journal
from joestar.data.progress import Progress
from joestar.data.structure import EdgeRules
from joestar.errors import DataError

BITS = 31
LOW = (1 << BITS) - 1
MOST_NODES = 1 << BITS
PARTS = 256
"""Files that edges are dealt to at a time: a byte says which, and bytes are sorted by counting."""
PER_GIVEN, PER_KEY = 144, 40
"""Bytes of memory of an edge while edges are dealt, and of a key while keys are sorted."""
MOST = 1 << 19
"""Edges that are dealt together, at most: arrays that caches hold."""
NODES = 1 << 20
"""Nodes whose offsets are written together, at most."""


class Sorter:
    """Sorts edges into ``indptr`` and ``indices``.

    Args:
        limit: bytes to work in. num_nodes: ids are below it.
    """

    def __init__(self, writer: FolderWriter, journal: Journal, rules: EdgeRules, num_nodes: int, limit: int):
        self.writer, self.journal, self.rules, self.num_nodes = writer, journal, rules, num_nodes
        threads = threads_for(limit, 64 << 20)
        share = limit // (threads + 1)
        self.limit, self.threads, self.step = limit, threads, int(max(256, min(MOST, share // PER_GIVEN)))
        self.capacity, self.nodes = int(max(256, limit // (2 * PER_KEY))), int(max(256, min(NODES, share // 32)))
        self.shift = max(0, (num_nodes - 1).bit_length() - 8) + BITS

    def run(self, edges: Edges, progress: Progress) -> dict[str, int]:
        """Deals and sorts. Counts: edges given, self-loops among them, edges written, self-loops among those.

        Raises:
            DataError: an id is out of range. OSError: the disk is full.
        """
        state = self.journal.state("deal", {"row": 0, "sizes": {}, "loops": 0})
        if not state.get("ended"):
            self._deal(edges, state, progress)
        self._subdivide(state, progress)
        self._sort(state, progress)
        written = self.journal.state("sort", {})
        return {"given": edges.count, "loops": state["loops"], "written": written["edges"], "kept": written["loops"]}

    # --- dealing ---

    def _deal(self, edges: Edges, state: dict, progress: Progress) -> None:
        files = _Files(self.writer.folder, state["sizes"])
        try:
            with ThreadPoolExecutor(self.threads) as pool:
                starts = range(state["row"], edges.count, self.step)
                pieces = ((first, *edges.read(first, self.step)) for first in starts)
                for end, loops, dealt, counts in in_order(pool, lambda piece: self._dealt(edges, *piece), pieces,
                                                          self.threads):  # fmt: skip
                    files.add([f"{part:03d}" for part in range(PARTS)], dealt, counts)
                    state |= {"row": end, "loops": state["loops"] + loops}
                    self.journal.save()
                    progress("dealing edges", end, edges.count)
        finally:
            files.close()
        state["ended"] = True
        state["pending"] = sorted(name for name, size in state["sizes"].items() if size)
        self.journal.save()

    def _dealt(self, edges: Edges, first: int, sources: np.ndarray, destinations: np.ndarray):
        """(end, self-loops, keys by part, keys of each part) of a piece."""
        self._check(edges, first, sources, destinations)
        count = len(sources)
        same = sources == destinations
        loops = int(np.count_nonzero(same))
        if loops and self.rules.drop_self_loops:
            sources, destinations = sources[~same], destinations[~same]
        keys = _keys(destinations, sources)
        if self.rules.undirected:
            back = _keys(sources, destinations)
            if loops and not self.rules.drop_self_loops:
                back = back[~same]
            keys = np.concatenate([keys, back])
            del back
        del same
        part = (keys >> self.shift).astype(np.uint8)
        return first + count, loops, keys[np.argsort(part, kind="stable")], np.bincount(part, minlength=PARTS)

    def _check(self, edges: Edges, first: int, sources: np.ndarray, destinations: np.ndarray) -> None:
        for side, ids in (("source", sources), ("destination", destinations)):
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_nodes):
                row = int(np.flatnonzero((ids < 0) | (ids >= self.num_nodes))[0])
                raise DataError(
                    f"{edges.where}: {edges.place(first + row)}: the {side} {int(ids[row])} is no node: ids must lie "
                    f"in 0..{self.num_nodes - 1} ({self.num_nodes} nodes)."
                )

    # --- files that are too large ---

    def _subdivide(self, state: dict, progress: Progress) -> None:
        """Deals files again until each fits, or has one key only."""
        while large := [name for name in state["pending"] if self._is_large(state, name)]:
            for name in large:
                self._divide(state, name)
                progress("dealing again", 0, 0)

    def _is_large(self, state: dict, name: str) -> bool:
        return state["sizes"][name] > self.capacity and name not in state.setdefault("same", {})

    def _divide(self, state: dict, name: str) -> None:
        path = _path(self.writer.folder, name)
        low = high = None
        for keys in _pieces(path, state["sizes"][name], self.capacity):
            low = int(keys.min()) if low is None else min(low, int(keys.min()))
            high = int(keys.max()) if high is None else max(high, int(keys.max()))
        if low == high:
            state["same"][name] = low
            self.journal.save()
            return
        # Not more files than needed: the journal, which is written after every file, names them all.
        parts = min(PARTS, 2 * -(-state["sizes"][name] // self.capacity))
        width = (high - low) // parts + 1
        names, sizes = [f"{name}.{part:03d}" for part in range(PARTS)], {}
        for other in names:
            _path(self.writer.folder, other).unlink(missing_ok=True)
        files = _Files(self.writer.folder, sizes)
        try:
            for keys in _pieces(path, state["sizes"][name], max(1, self.capacity // 2)):
                part = ((keys - low) // width).astype(np.uint8)
                files.add(names, keys[np.argsort(part, kind="stable")], np.bincount(part, minlength=PARTS))
        finally:
            files.close()
        at = state["pending"].index(name)
        state["pending"][at : at + 1] = [other for other in names if sizes.get(other)]
        state["sizes"] |= sizes
        del state["sizes"][name]
        self.journal.save()
        path.unlink()

    # --- sorting ---

    def _sort(self, state: dict, progress: Progress) -> None:
        done = self.journal.state("sort", {"edges": 0, "node": 0, "loops": 0})
        total = sum(state["sizes"].values())
        if done.get("ended"):
            self.writer.arrays |= done["arrays"]
            return
        indices = self.writer.open("indices", "int32", rows=done["edges"])
        indptr = self.writer.open("indptr", "int64", rows=done["node"])
        largest = max(1, *state["sizes"].values(), 1)
        threads = max(1, min(self.threads, self.limit // (PER_KEY * largest) - 1))
        with ThreadPoolExecutor(threads) as pool:
            files = in_order(pool, lambda name: self._sorted(state, name), list(state["pending"]), threads)
            for name, pieces in files:
                for destinations, sources, loops in pieces:
                    self._offsets(indptr, destinations, indices.rows, int(destinations[-1]) + 1)
                    indices.append(sources)
                    done["loops"] += loops
                state["pending"].remove(name)
                done |= {"edges": indices.rows, "node": indptr.rows}
                del state["sizes"][name]
                self.journal.save()
                _path(self.writer.folder, name).unlink(missing_ok=True)
                progress("sorting edges", total - sum(state["sizes"].values()), total)
        self._offsets(indptr, np.empty(0, np.int32), indices.rows, self.num_nodes + 1)
        self.writer.keep("indices", indices)
        self.writer.keep("indptr", indptr)
        arrays = {key: self.writer.arrays[key] for key in ("indptr", "indices")}
        done |= {"ended": True, "edges": indices.rows, "arrays": arrays}
        self.journal.save()

    def _sorted(self, state: dict, name: str) -> tuple[str, Iterable]:
        """(name, pieces of destinations, sources, self-loops) of a file, in order."""
        if name in state.get("same", {}):
            return name, self._repeated(state["same"][name], state["sizes"][name])
        keys = np.fromfile(_path(self.writer.folder, name), np.int64, state["sizes"][name])
        if len(keys) != state["sizes"][name]:
            raise DataError(f"{self.writer.folder}: the part {name} is shorter than it was. Run it again.")
        keys.sort()
        if self.rules.drop_duplicates and len(keys) > 1:
            new = np.empty(len(keys), dtype=bool)
            new[0] = True
            np.not_equal(keys[1:], keys[:-1], out=new[1:])
            keys = keys[new]
        return name, [_ends(keys)]

    def _repeated(self, key: int, count: int) -> Iterator:
        left = 1 if self.rules.drop_duplicates else count
        while left:
            piece = min(left, self.capacity)
            yield _ends(np.full(piece, key, dtype=np.int64))
            left -= piece

    def _offsets(self, indptr, destinations: np.ndarray, before: int, end: int) -> None:
        """Writes ``indptr`` of the nodes below ``end``, which no later edge leads to one before.

        An offset is the number of edges to smaller ids: of ``before``, and of those among ``destinations``.
        """
        while indptr.rows < end:
            first, last = indptr.rows, min(end, indptr.rows + self.nodes)
            begin, stop = np.searchsorted(destinations, [first, last])
            counts = np.bincount(destinations[begin:stop] - first, minlength=last - first)
            offsets = np.cumsum(counts) - counts
            indptr.append(offsets + (before + begin))


class _Files:
    """Files of keys, appended to; ``sizes`` has the keys that are in each, and what is beyond is cut off."""

    def __init__(self, folder: Path, sizes: dict[str, int]):
        self.folder, self.sizes, self.open = folder, sizes, {}

    def add(self, names: list[str], keys: np.ndarray, counts: np.ndarray) -> None:
        """Appends keys that lie in the order of their parts."""
        ends = np.cumsum(counts)
        for part in np.flatnonzero(counts).tolist():
            name = names[part]
            if name not in self.open:
                path, size = _path(self.folder, name), self.sizes.get(name, 0)
                self.open[name] = open_to_append(path, size * 8)
            write_all(self.open[name], keys[ends[part] - counts[part] : ends[part]])
            self.sizes[name] = self.sizes.get(name, 0) + int(counts[part])

    def close(self) -> None:
        """Closes them."""
        for file in self.open.values():
            file.close()


def highest_id(edges: Edges, limit: int, progress: Progress) -> int:
    """The largest id that edges name, -1 if there are none."""
    step, high = int(max(256, min(MOST, limit // 64))), -1
    for first in range(0, edges.count, step):
        high = max(high, *(int(side.max()) for side in edges.read(first, step) if len(side)))
        progress("counting nodes", min(first + step, edges.count), edges.count)
    return high


def _keys(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    keys = high.astype(np.int64)
    keys <<= BITS
    keys |= low.astype(np.int64, copy=False)
    return keys


def _ends(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    destinations, sources = (keys >> BITS).astype(np.int32), (keys & LOW).astype(np.int32)
    return destinations, sources, int(np.count_nonzero(destinations == sources))


def _pieces(path: Path, count: int, step: int) -> Iterator[np.ndarray]:
    with open(path, "rb", buffering=0) as file:
        for first in range(0, count, step):
            yield np.fromfile(file, np.int64, min(step, count - first))


def _path(folder: Path, name: str) -> Path:
    return folder / f"keys-{name}.staged"
