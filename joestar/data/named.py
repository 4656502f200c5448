"""Public datasets by name, through the packages that have them: ``pyg:Planetoid/Cora``, ``ogb:ogbn-products``."""

import difflib
from pathlib import Path

import numpy as np

from joestar.data.foreign import from_object
from joestar.data.labels import from_array
from joestar.data.ogb import folder_names
from joestar.data.parts import Options, Parts, to_graph
from joestar.data.structure import EdgeRules, make_structure
from joestar.errors import DataError
from joestar.graph_api import Graph

PREFIXES = ("pyg:", "ogb:")


def load_named(name: str, roots: list[Path], options: Options) -> Graph:
    """The dataset behind ``pyg:Class/name`` or ``ogb:name``, downloaded by its package into ``root`` if need be.

    Raises:
        DataError: the package is missing or knows no such dataset, the download failed, or it has several graphs.
    """
    package, _, rest = name.partition(":")
    if package == "pyg":
        return _of_pyg(name, rest, roots[0], options)
    return _of_ogb(name, rest, roots[0], options)


def downloaded_to(name: str, root: Path) -> Path | None:
    """The folder in which a package keeps the dataset ``name``, if it is there."""
    package, _, rest = name.partition(":")
    folders = [Path("pyg") / rest.partition("/")[0]] if package == "pyg" else folder_names(rest)
    return next((root / folder for folder in folders if rest and (root / folder).is_dir()), None)


def _of_pyg(name: str, rest: str, root: Path, options: Options) -> Graph:
    try:
        from torch_geometric import datasets
    except ImportError:
        raise DataError(
            f"{name}: datasets of this name come from torch_geometric, which is not installed: pip install "
            "torch-geometric"
        ) from None
    kind, _, called = rest.partition("/")
    known = [other for other in dir(datasets) if other[:1].isupper()]
    if kind not in known:
        close = difflib.get_close_matches(kind, known, n=1)
        guess = f" Did you mean 'pyg:{close[0]}'?" if close else ""
        raise DataError(
            f"{name}: torch_geometric.datasets has no {kind!r}.{guess} The name is pyg:Class/name, such as "
            "pyg:Planetoid/Cora, or pyg:Class where the class takes no name, such as pyg:Reddit."
        )
    folder = root / "pyg" / kind
    arguments = {"name": called} if called else {}
    made = _made(name, lambda: getattr(datasets, kind)(root=str(folder), **arguments), folder)
    if len(made) != 1:
        raise DataError(
            f"{name}: it has {len(made)} graphs, and Joestar trains on one. Make one of them, "
            "torch_geometric.data.Batch.from_data_list(list(dataset)), and give it to joestar.Graph.from_pyg."
        )
    graph = from_object(made, options)
    graph.name = rest
    return graph


def _of_ogb(name: str, rest: str, root: Path, options: Options) -> Graph:
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError:
        raise DataError(
            f"{name}: datasets of this name come from ogb, which is not installed: pip install ogb"
        ) from None
    if not rest.startswith("ogbn-"):
        raise DataError(f"{name}: expected a dataset for nodes, such as ogb:ogbn-arxiv or ogb:ogbn-products.")
    made = _made(name, lambda: NodePropPredDataset(name=rest, root=str(root)), root)
    content, y = made[0]
    if "edge_index_dict" in content:
        raise DataError(f"{name}: this graph has several types of nodes; Joestar reads graphs with one type only.")
    edges, number = content["edge_index"], int(content["num_nodes"])
    edata = {}
    if content.get("edge_feat") is not None:
        edata["edge_attr"] = np.asarray(content["edge_feat"], dtype=np.float32)
    rules = options.rules(EdgeRules())
    structure = make_structure(edges[0], edges[1], number, rules, name, order=bool(edata))
    labels = from_array(np.asarray(y), number, name, options.task or "classes")
    if not labels.multilabel:
        labels.num_classes = int(made.num_classes)
    split = {part: np.asarray(ids).reshape(-1) for part, ids in made.get_idx_split().items()}
    splits = {"train": split["train"], "val": split["valid"], "test": split["test"]}
    x = content.get("node_feat")
    return to_graph(Parts(name, rest, structure, x, labels, splits, edata), options)


def _made(name: str, make, folder: Path):
    """What ``make`` gives; what goes wrong in another package, in a sentence."""
    try:
        return make()
    except KeyboardInterrupt:
        raise
    except (SystemExit, Exception) as error:  # ogb exits where a download is declined
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{name}: it could not be downloaded to, or read from, {folder} ({type(error).__name__}: {first}). Is the "
            "name right, and is there a network, space and permission? Another folder: root=..."
        ) from error
