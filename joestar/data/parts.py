"""What every reader hands over, its checks, and the graph made of it."""

import sys
from dataclasses import dataclass, field

import numpy as np
import torch

from joestar.data.float32 import in_float32
from joestar.data.labels import Labels, from_array, labelled_nodes
from joestar.data.splits import SplitChoice, choose_split, random_split
from joestar.data.structure import EdgeRules, Structure, make_structure
from joestar.errors import DataError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import from_array as as_tensor


@dataclass(frozen=True)
class Options:
    """What a caller may choose of every loader; ``None``: as the format has it.

    Attributes:
        split, seed: see ``SplitChoice``.
        undirected, drop_duplicates, drop_self_loops: see ``EdgeRules``.
        task: ``"classes"``, ``"regression"``, or ``None``: by the labels.
        verbose: print what was done to the graph.
    """

    split: SplitChoice = "auto"
    seed: int | None = 0
    undirected: bool | None = None
    drop_duplicates: bool | None = None
    drop_self_loops: bool | None = None
    task: str | None = None
    verbose: bool = True

    def rules(self, usual: EdgeRules) -> EdgeRules:
        """The rules for edges: what was chosen, else the format's."""
        given = {name: getattr(self, name) for name in ("undirected", "drop_duplicates", "drop_self_loops")}
        for name, value in given.items():
            if value is not None and not isinstance(value, bool):
                raise DataError(f"{name} must be True, False or None; got {value!r}.")
        made = {name: getattr(usual, name) if value is None else value for name, value in given.items()}
        if self.undirected and self.drop_duplicates is None:
            made["drop_duplicates"] = True
        return EdgeRules(**made)


@dataclass
class Parts:
    """A dataset as NumPy arrays.

    Attributes:
        where: the file or folder, for messages.
        name: the graph's name.
        structure: the edges, and what happened to them.
        x: features ``[N, F]``, floating point; may be memory-mapped; ``None``: there are none.
        y: labels as found (``labels.from_array``), or read already; ``None``: there are none.
        splits: the official ``train``, ``val`` and ``test`` ids, or empty.
        edata: data of the given edges, a row each; ``structure.order`` says which edge has which.
        notes: what to tell the user.
    """

    where: str
    name: str
    structure: Structure
    x: np.ndarray | None
    y: np.ndarray | Labels | None
    splits: dict[str, np.ndarray] = field(default_factory=dict)
    edata: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.structure.indptr) - 1


def to_graph(parts: Parts, options: Options) -> Graph:
    """Checks the parts and builds a ``Graph`` with what there is of ``ndata["x"]``, ``ndata["y"]`` and index sets.

    Raises:
        DataError: shapes or dtypes do not fit, labels or splits are out of range.
    """
    structure, where, number = parts.structure, parts.where, parts.num_nodes
    labels = parts.y
    if isinstance(labels, np.ndarray):
        labels = from_array(labels, number, where, options.task)
    ndata = {}
    if parts.x is not None:
        ndata["x"] = as_tensor(np.ascontiguousarray(_features(parts)), "x")
    if labels is not None:
        ndata["y"] = as_tensor(labels.y, "y")
        if labels.note:
            parts.notes.append(f"labels: {labels.note}")
    splits = _splits(parts, labels, options)
    edata = {key: as_tensor(value[structure.order], key) for key, value in parts.edata.items()}
    indptr, indices = as_tensor(structure.indptr, "indptr"), as_tensor(structure.indices, "indices")
    graph = Graph.from_csc(indptr, indices, ndata, edata, validate=False)
    graph.name = parts.name
    if labels is not None:
        graph.multilabel, graph.num_classes, graph.class_names = (
            labels.multilabel, labels.num_classes, labels.class_names
        )  # fmt: skip
    for part, ids in splits.items():
        setattr(graph, f"{part}_idx", ids)
    if options.verbose:
        tell(where, [structure.sentence()] if structure.changed or structure.one_way else [], parts.notes)
    return graph


def _splits(parts: Parts, labels: Labels | None, options: Options) -> dict[str, np.ndarray]:
    if labels is None:
        everyone = np.arange(parts.num_nodes)
        if not parts.splits and options.split in ("auto", "official"):
            return {}
        return choose_split(parts.splits, everyone, parts.num_nodes, options.split, options.seed, parts.where)
    labelled = labelled_nodes(labels.y)
    if len(labelled) == 0:
        raise DataError(
            f"{parts.where}: not one of the {parts.num_nodes} nodes has a label; node classification needs some."
        )
    return choose_split(parts.splits, labelled, parts.num_nodes, options.split, options.seed, parts.where)


def drawn_split(graph: Graph, options: Options) -> dict[str, torch.Tensor]:
    """A random split of a graph that is made already, on its device: of the nodes with a label; without labels of all
    nodes, if one is asked for, else none.
    """
    y = graph.ndata.get("y")
    if y is None and options.split in ("auto", "official"):
        return {}
    nodes = np.arange(graph.num_nodes) if y is None else labelled_nodes(y.cpu().numpy())
    shares = (tuple(options.split),) if isinstance(options.split, (tuple, list)) else ()
    found = random_split(nodes, options.seed, *shares)
    return {part: torch.from_numpy(ids).to(graph.device) for part, ids in found.items()}


def apply_rules(graph: Graph, options: Options, where: str) -> Graph:
    """The graph with its edges as the caller chose; itself if nothing was chosen."""
    if options.undirected is options.drop_duplicates is options.drop_self_loops is None:
        return graph
    rules = options.rules(EdgeRules(False, False, False))
    src, dst, _ = graph.coo()
    ends = (end.cpu().numpy().astype(np.int64) for end in (src, dst))
    structure = make_structure(*ends, graph.num_nodes, rules, where, order=True)
    order = torch.from_numpy(structure.order).to(graph.device)
    edata = {key: value[order] for key, value in graph.edata.items()}
    tensors = (torch.from_numpy(array).to(graph.device) for array in (structure.indptr, structure.indices))
    if options.verbose:
        tell(where, [structure.sentence()])
    return graph._describe(Graph.from_csc(*tensors, graph.ndata, edata, validate=False))


def tell(where: str, *notes: list[str]) -> None:
    """Prints what was done to a graph, to standard error."""
    for note in (note for group in notes for note in group):
        print(f"{where}: {note}", file=sys.stderr)


def _features(parts: Parts) -> np.ndarray:
    x = parts.x
    if x.ndim != 2 or len(x) != parts.num_nodes or x.shape[1] == 0:
        raise DataError(
            f"{parts.where}: features must be [{parts.num_nodes}, F] with F > 0; got shape {list(x.shape)}."
        )
    x = x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise DataError(f"{parts.where}: features must be float16, float32 or float64; got {x.dtype}.")
    if x.dtype == np.float64:
        parts.notes.append("features were float64 and are float32 now, which models compute in.")
        return in_float32(x, f"{parts.where}: features")
    return x
