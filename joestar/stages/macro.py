"""``MacroBatch``: a part of a graph that a first stage chose, from which mini-batches are sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import GraphError

LARGEST = torch.iinfo(torch.int32).max
"""Local ids are int32."""
PART = 1 << 23
"""Edges whose sources are 64 bits wide at a time."""


@dataclass(frozen=True)
class MacroBatch:
    """A subgraph in CSC with local ids, on the CPU.

    Attributes:
        seeds: int32 ``[m]``, local ids of the seeds, in the order given; a seed may stand several times.
        ids: ``[n]`` in the graph's id dtype, the node that every local id stands for, each once. The ``r`` nodes that
            may have in-edges come first; both parts ascend.
        indptr: int64 ``[r + 1]``, in-edges of the first ``r`` local nodes; the others have none here.
        indices: int32 ``[e]``, local sources; the edges of a row are in the order in which the whole graph has them.
        eids: int64 ``[e]``, positions of the edges in the whole graph, ascending; ``None`` if nobody asked for them.
    """

    seeds: Tensor
    ids: Tensor
    indptr: Tensor
    indices: Tensor
    eids: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """``n``."""
        return self.ids.shape[0]

    @property
    def num_rows(self) -> int:
        """``r``: nodes that may have in-edges here."""
        return self.indptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """``e``."""
        return self.indices.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = self.seeds, self.ids, self.indptr, self.indices, self.eids
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.num_nodes:,} nodes and {self.num_edges:,} edges"

    def __repr__(self) -> str:
        return f"MacroBatch({self.seeds.shape[0]:,} seeds, {self.num_nodes:,} nodes, {self.num_edges:,} edges)"


@dataclass(frozen=True)
class Picked:
    """What a first stage picked: rows and their sources in the ids of the whole graph, on the CPU.

    What a ``MacroBatch`` is for whoever has a table of all nodes: nodes that are no rows are not told apart.

    Attributes:
        seeds: ``[m]`` in the graph's id dtype, in the order given; a seed may stand several times.
        rows: ``[r]`` in that dtype, the nodes that may have in-edges, each once, in an order that does not depend on
            the number of threads; all seeds are among them.
        indptr: int64 ``[r + 1]``, in-edges of every row.
        sources: ``[e]`` in that dtype; the edges of a row are in the order in which the whole graph has them.
        eids: int64 ``[e]``, positions of the edges in the whole graph; ``None`` if nobody asked for them.
    """

    seeds: Tensor
    rows: Tensor
    indptr: Tensor
    sources: Tensor
    eids: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """``r``."""
        return self.rows.shape[0]

    @property
    def num_edges(self) -> int:
        """``e``."""
        return self.sources.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = self.seeds, self.rows, self.indptr, self.sources, self.eids
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @staticmethod
    def of(macro: MacroBatch) -> "Picked":
        """A macro-batch in the ids of the whole graph."""
        seeds, sources = (torch.index_select(macro.ids, 0, local) for local in (macro.seeds, macro.indices))
        return Picked(seeds, macro.ids[: macro.num_rows], macro.indptr, sources, macro.eids)

    @property
    def size(self) -> str:
        """In words."""
        return f"{self.num_rows:,} rows and {self.num_edges:,} edges"

    def __repr__(self) -> str:
        return f"Picked({self.seeds.shape[0]:,} seeds, {self.num_rows:,} rows, {self.num_edges:,} edges)"


def nodes_of(macro: MacroBatch | Picked, num_nodes: int, device: torch.device) -> Tensor:
    """Ids of a macro-batch's nodes, each once, on any device: of picked edges found on this one, ascending.

    Args:
        num_nodes: of the whole graph.
    """
    if not isinstance(macro, Picked):
        return macro.ids
    found = torch.zeros(num_nodes, dtype=torch.bool, device=device)
    for part in (macro.rows, *macro.sources.split(PART)):
        found[part.to(device, torch.int64)] = True
    return torch.nonzero(found).flatten()


def check_macro_batch(macro: MacroBatch, graph=None) -> MacroBatch:
    """``macro`` if it is one, for first stages of one's own: a few passes over all of it.

    Args:
        graph: the whole graph, to compare every edge with; ``None`` to look at ``macro`` alone.

    Raises:
        GraphError: naming the first entry that is wrong.
    """
    _check_shapes(macro)
    n, r, e = macro.num_nodes, macro.num_rows, macro.num_edges
    _require(r <= n <= LARGEST, f"at most {LARGEST} nodes, and no more rows than nodes", f"{n} nodes, {r} rows")
    _check_range(macro.seeds, n, "seeds")
    _check_range(macro.indices, n, "indices")
    offsets = macro.indptr
    rises = int(offsets[0]) == 0 and int(offsets[-1]) == e and bool((offsets.diff() >= 0).all())
    _require(rises, f"indptr from 0 to {e}, non-decreasing", f"{int(offsets[0])} to {int(offsets[-1])}")
    for name, part in (("ids[:r]", macro.ids[:r]), ("ids[r:]", macro.ids[r:]), ("eids", macro.eids)):
        if part is not None:
            _check_ascends(part, name)
    _require(not torch.isin(macro.ids[r:], macro.ids[:r]).any(), "every node once", "ids of both parts")
    if graph is not None:
        _check_edges(macro, graph)
    return macro


def _require(holds: bool, expected: str, came: str) -> None:
    if not holds:
        raise GraphError(f"macro-batch: expected {expected}; got {came}.")


def _check_shapes(macro: MacroBatch) -> None:
    dtypes = {"seeds": (torch.int32,), "ids": (torch.int32, torch.int64), "indptr": (torch.int64,)}
    dtypes |= {"indices": (torch.int32,), "eids": (torch.int64,)}
    for name, allowed in dtypes.items():
        value = getattr(macro, name)
        if value is None and name == "eids":
            continue
        good = isinstance(value, Tensor) and value.dim() == 1 and value.dtype in allowed and value.is_cpu
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        came = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
        _require(good, f"{name} to be {wanted}, one-dimensional, on the CPU", came)
    _require(macro.indptr.numel() > 0, "indptr with at least one entry", "an empty one")
    edges = macro.num_edges if macro.eids is None else macro.eids.shape[0]
    _require(edges == macro.num_edges, f"one of eids for each of {macro.num_edges} edges", f"{edges}")


def _check_range(ids: Tensor, limit: int, name: str) -> None:
    wrong = torch.nonzero((ids < 0) | (ids >= limit)).flatten()
    if wrong.numel():
        at = int(wrong[0])
        _require(False, f"{name} in [0, {limit})", f"{name}[{at}] = {int(ids[at])}")


def _check_ascends(values: Tensor, name: str) -> None:
    wrong = torch.nonzero(values.diff() <= 0).flatten()
    if wrong.numel():
        at = int(wrong[0])
        _require(False, f"{name} to ascend", f"{int(values[at])}, then {int(values[at + 1])}, at {at}")


def _check_edges(macro: MacroBatch, graph) -> None:
    _check_range(macro.ids, graph.num_nodes, "ids")
    _require(macro.ids.dtype == graph.indices.dtype, f"ids of {graph.indices.dtype}", f"{macro.ids.dtype}")
    if macro.eids is None:
        return
    rows = macro.ids[: macro.num_rows].long()
    degrees = macro.indptr.diff()
    first, last = (graph.indptr[ends].repeat_interleave(degrees) for ends in (rows, rows + 1))
    good = (macro.eids >= first) & (macro.eids < last)
    wrong = torch.nonzero(~good).flatten()
    _require(not wrong.numel(), "edges of their rows", f"eids[{wrong[:1].tolist()}] of another row")
    same = graph.indices[macro.eids] == macro.ids[macro.indices.long()]
    wrong = torch.nonzero(~same).flatten()
    _require(not wrong.numel(), "the sources that the graph has", f"another at edge {wrong[:1].tolist()}")
