"""``joestar.load``: one entrance to every form a dataset may have."""

import difflib
import os
from pathlib import Path

import torch

from joestar.data import ogb
from joestar.data.folder import is_converted, read_folder
from joestar.data.npz import read_npz
from joestar.data.parts import labelled_nodes, to_graph
from joestar.data.splits import check_choice, random_split
from joestar.errors import DataError
from joestar.graph_api import Graph

BUNDLED = {"cora": Path(__file__).parent / "bundled" / "cora.npz"}


def load(
    name_or_path: str | os.PathLike, *, root: str | os.PathLike | None = None, split: str = "auto", seed: int = 0
) -> Graph:
    """Loads a graph for node classification.

    Args:
        name_or_path: a path to an ``.npz`` file (format: ``joestar.data.npz``), to a dataset folder of OGB or to a
            folder written by ``joestar.data.save``; or a name: ``"cora"``, which comes with Joestar, or that of a
            file or folder under ``root``, such as ``"ogbn-products"``.
        root: where names are looked up. Default: ``$JOESTAR_DATA``, ``~/.cache/joestar`` and ``dataset``.
        split: ``"official"``, ``"random"`` (60/20/20 of the labelled nodes), or ``"auto"``: official if there is one.
            A converted folder keeps the split it was saved with unless ``"random"`` is asked for.
        seed: of the random split.

    Returns:
        A ``Graph``: undirected, without self-loops; ``ndata["x"]`` float ``[N, F]``, ``ndata["y"]`` int64 ``[N]``
        (-100 where unlabelled) or float32 ``[N, T]`` multi-label (NaN where unknown); ``train_idx``, ``val_idx`` and
        ``test_idx`` int64. (A converted folder gives the graph as it was saved.)

    Raises:
        DataError: nothing is found, or what is found is malformed.
    """
    check_choice(split)
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name in BUNDLED and root is None:
        return to_graph(read_npz(BUNDLED[name]), split, seed)
    if path.exists() and _readable(path):
        return _read(path, path.name, split, seed)
    for candidate in _candidates(name, root):
        if candidate.exists() and _readable(candidate):
            return _read(candidate, name, split, seed)
    raise DataError(_not_found(name, path, root))


def _roots(root: str | os.PathLike | None) -> list[Path]:
    if root is not None:
        return [Path(root).expanduser()]
    chosen = os.environ.get("JOESTAR_DATA")
    return [Path(place).expanduser() for place in (chosen, "~/.cache/joestar", "dataset") if place]


def _candidates(name: str, root: str | os.PathLike | None) -> list[Path]:
    names = [name, f"{name}.npz"] + [other for other in ogb.folder_names(name) if other != name]
    return [place / candidate for place in _roots(root) for candidate in names]


def _readable(path: Path) -> bool:
    return path.is_file() or is_converted(path) or ogb.is_ogb(path)


def _read(path: Path, name: str, split: str, seed: int) -> Graph:
    if path.is_file():
        return to_graph(read_npz(path), split, seed)
    if is_converted(path):
        return _resplit(read_folder(path), split, seed, path)
    return to_graph(ogb.read_ogb(path, _official_name(name)), split, seed)


def _official_name(name: str) -> str:
    """``ogbn-products`` for ``ogbn_products`` and ``ogbn_products_pyg``; other names as they are."""
    for known in ogb.SCHEMES:
        if name in ogb.folder_names(known):
            return known
    return name


def _not_found(name: str, path: Path, root: str | os.PathLike | None) -> str:
    places = ", ".join(str(place) for place in _roots(root))
    looked = f"No dataset {name!r}: it is no bundled dataset ({', '.join(BUNDLED)}), "
    if path.exists():
        return (
            looked + f"and the folder {path} holds neither meta.json (a graph written by joestar.data.save) nor raw/ "
            "(a dataset of OGB)."
        )
    looked += f"no file or folder of that name, and nothing was found under {places}."
    official = _official_name(name)
    if official in ogb.SCHEMES:
        return f"{looked} {ogb.how_to_get(official, _roots(root)[0])}"
    known = [*BUNDLED, *ogb.SCHEMES]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"{looked}{guess} Known names: {', '.join(known)}; or give the path of a .npz file or folder."


def _resplit(graph: Graph, split: str, seed: int, path: Path) -> Graph:
    """The split a converted folder was saved with, or a new random one."""
    has_split = graph.train_idx is not None
    if has_split and split != "random":
        return graph
    if split == "official":
        raise DataError(f"{path}: it was saved without a split. Use split='random', which is 60/20/20 by the seed.")
    if "y" not in graph.ndata:
        return graph
    for part, ids in random_split(labelled_nodes(graph.ndata["y"].numpy()), seed).items():
        setattr(graph, f"{part}_idx", torch.from_numpy(ids))
    return graph
