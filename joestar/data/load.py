"""``joestar.load``: one entrance to every form a dataset may have."""

import difflib
import os
from pathlib import Path

from joestar.data import ogb
from joestar.data.convert_inputs import CITATIONS
from joestar.data.folder import is_converted, read_folder
from joestar.data.foreign import from_object
from joestar.data.from_tables import from_tables
from joestar.data.labels import check_task
from joestar.data.named import PREFIXES, downloaded_to, load_named
from joestar.data.npz import read_npz
from joestar.data.parts import Options, apply_rules, drawn_split, to_graph
from joestar.data.splits import PARTS, SplitChoice, check_choice
from joestar.data.table import ENDS, PARQUET, TEXT, is_frame, is_table, only_one
from joestar.distributed import current
from joestar.errors import DataError
from joestar.graph_api import Graph

BUNDLED = {"cora": Path(__file__).parent / "bundled" / "cora.npz"}
OTHERS = {
    ".npy": "it is one array, and a graph has edges and features: joestar.load('edges.csv', features='{name}'), or "
    "joestar.Graph.from_edge_index(numpy.load(...), ndata={{'x': ...}})",
    ".pt": "load it yourself, data = torch.load('{name}', weights_only=False) if you trust it, and give "
    "joestar.load(data)",
    ".mtx": "joestar.Graph.from_scipy(scipy.io.mmread('{name}')) reads Matrix Market files",
    ".mat": "read it with scipy.io.loadmat and give its matrix to joestar.Graph.from_scipy",
    ".graphml": "joestar.Graph.from_networkx(networkx.read_graphml('{name}')) reads it",
    ".gml": "joestar.Graph.from_networkx(networkx.read_gml('{name}')) reads it",
    ".gexf": "joestar.Graph.from_networkx(networkx.read_gexf('{name}')) reads it",
    ".xlsx": "save the sheets as CSV, or give joestar.data.from_tables a pandas frame of each",
    ".json": "make tables of edges and nodes and give them to joestar.data.from_tables",
}
"""What to do with files that Joestar does not read."""
_OTHERS = (".pkl", ".pickle", ".pth"), ".pt"


def load(
    name_or_path,
    *,
    root: str | os.PathLike | None = None,
    split: SplitChoice | int | None = "auto",
    seed: int | None = 0,
    undirected: bool | None = None,
    drop_duplicates: bool | None = None,
    drop_self_loops: bool | None = None,
    task: str | None = None,
    verbose: bool = True,
    verify: bool = False,
    **table,
) -> Graph:
    """Loads a graph: a file, a folder, a public dataset by name, or another library's graph.

    Args:
        name_or_path: a path to an ``.npz`` file (format: ``joestar.data.npz``), to a table of edges (CSV, TSV,
            Parquet), to a folder with ``edges.csv`` and ``nodes.csv``, to a dataset folder of OGB or to a folder
            written by ``joestar.data.save``; or a name: ``"cora"``, which comes with Joestar, ``"pyg:Planetoid/Cora"``
            or ``"ogb:ogbn-products"``, which those packages download, or that of a file or folder under ``root``; or
            an object: PyG's ``Data``, a NetworkX, DGL or SciPy graph, a data frame of edges.
        root: where names are looked up, and where downloads go. Default: ``$JOESTAR_DATA``, ``~/.cache/joestar`` and
            ``dataset``.
        split: ``"official"``, ``"random"`` (60/20/20 of the labelled nodes; without labels of all), shares of such a
            split, as ``(0.8, 0.1, 0.1)``, or ``"auto"``: official if there is one. A converted folder keeps the split
            that it was saved with unless another is asked for. For masks ``[N, S]`` of PyG: which of the S splits, from
            0. For tables also a column, see ``from_tables``.
        seed: of the random split, a whole number of at least 0, taken modulo 2^32; ``None``: another one every time.
        undirected: add the reverses of edges. ``None``: what the format says (npz and OGB: yes; others: as given).
        drop_duplicates, drop_self_loops: leave those out. ``None``: as above. What is done is printed with counts.
        task: ``"classes"`` or ``"regression"`` where labels are whole numbers and could be either.
        verbose: print what was done to the graph, to standard error.
        verify: of a converted folder: read all of it and compare checksums. Sizes are compared always.
        **table: further arguments for tables, see ``joestar.data.from_tables``: ``nodes=``, ``features=``, ...

    Returns:
        A ``Graph``; as there are: ``ndata["x"]`` float ``[N, F]``, ``ndata["y"]`` int64 ``[N]`` (-100 where
        unlabelled), float32 ``[N, T]`` multi-label (NaN where unknown) or float32 targets for regression;
        ``edata["edge_weight"]`` and ``edata["edge_attr"]``; ``train_idx``, ``val_idx`` and ``test_idx`` int64.

    Raises:
        DataError: nothing is found, or what is found is malformed. GraphError: another library's graph is.
    """
    check_task(task)
    options = Options(split, seed, undirected, drop_duplicates, drop_self_loops, task, verbose)
    if not isinstance(name_or_path, (str, os.PathLike)):
        if is_frame(name_or_path):
            return _of_tables(name_or_path, options, table)
        _no_further(table, type(name_or_path).__name__)
        return from_object(name_or_path, options)
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if _is_of_tables(path):
        return (_of_folder if path.is_dir() else _of_tables)(path, options, table)
    _no_further(table, name)
    if name.startswith(PREFIXES):
        return _downloaded(name, _roots(root), options)
    check_choice(split)
    if name in BUNDLED and root is None:
        return to_graph(read_npz(BUNDLED[name], options), options)
    found = _found(name, root)
    if found is None:
        raise DataError(_not_found(name, path, root))
    return _read(found, path.name if found == path else name, options, verify)


def place_of(name: str, root: str | os.PathLike | None = None) -> Path | None:
    """The file or folder that ``load(name, root=root)`` reads; ``None`` where there is none (yet)."""
    path = Path(name).expanduser()
    if _is_of_tables(path):
        return path
    if name.startswith(PREFIXES):
        return downloaded_to(name, _roots(root)[0])
    return BUNDLED[name] if name in BUNDLED and root is None else _found(name, root)


def _is_of_tables(path: Path) -> bool:
    if path.is_dir():
        return not is_converted(path) and _edges_in(path) is not None
    return path.is_file() and is_table(path)


def _found(name: str, root: str | os.PathLike | None) -> Path | None:
    """The first that is there and can be read, of a path and of what a name may mean."""
    places = (Path(name).expanduser(), *_candidates(name, root))
    return next((place for place in places if place.exists() and _readable(place)), None)


def _downloaded(name: str, roots: list[Path], options: Options) -> Graph:
    """By a package that leaves files behind: of several ranks one per host goes first."""
    group = current()
    if group is None:
        return load_named(name, roots, options)
    return group.in_turn(f"joestar.load({name!r})", lambda: load_named(name, roots, options))


def _of_tables(edges, options: Options, table: dict) -> Graph:
    chosen = {"split": None if options.split == "auto" else options.split, "undirected": bool(options.undirected)}
    names = ("seed", "task", "drop_duplicates", "drop_self_loops", "verbose")
    try:
        return from_tables(edges, **chosen, **{name: getattr(options, name) for name in names}, **table)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise DataError(f"joestar.load: {error}; see joestar.data.from_tables for what tables take.") from None


def _of_folder(folder: Path, options: Options, table: dict) -> Graph:
    """A folder with ``edges.csv``, and ``nodes.csv`` or ``features.npy`` and ``labels.npy`` if they are there."""
    unread = [file.name for part in PARTS if (file := folder / f"{part}_idx.npy").is_file()]
    if unread and options.split == "auto" and table.get("split") is None:
        raise DataError(
            f"{folder}: load does not read {', '.join(unread)} beside tables: joestar convert does. Or give split=, or "
            "name the sets in a column `split` of nodes.csv and remove what is not read."
        )
    nodes = only_one(folder, "nodes", ENDS)
    found = {} if nodes is None else {"nodes": nodes}
    for what, file in (("features", "features.npy"), ("label", "labels.npy")):
        if (folder / file).is_file():
            found[what] = folder / file
    return _of_tables(_edges_in(folder), options, {"name": folder.name, **found, **table})


def _edges_in(folder: Path) -> Path | None:
    """A folder's table of edges; ``.npy`` is looked for as ``joestar convert`` reads it."""
    found = only_one(folder, "edges", (".npy", *ENDS))
    return None if found is None or found.suffix == ".npy" else found


def _no_further(table: dict, name: str) -> None:
    if table:
        raise DataError(
            f"joestar.load({name!r}) has no use for {', '.join(table)}: those are arguments for tables of edges and "
            f"nodes ({', '.join(TEXT)}, {', '.join(PARQUET)} and data frames)."
        )


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


def _read(path: Path, name: str, options: Options, verify: bool) -> Graph:
    if path.is_file():
        _check_archive(path)
        return to_graph(read_npz(path, options), options)
    if is_converted(path):
        return apply_rules(_resplit(read_folder(path, verify=verify), options, path), options, str(path))
    return to_graph(ogb.read_ogb(path, _official_name(name), options), options)


def _check_archive(path: Path) -> None:
    """Raises, with what to do, for a file that is of another format by its name."""
    end = path.suffix.lower()
    end = _OTHERS[1] if end in _OTHERS[0] else end
    if end in OTHERS:
        raise DataError(f"{path}: {OTHERS[end].format(name=path.name)}.")
    if end != ".npz":
        with open(path, "rb") as file:
            is_zip = file.read(2) == b"PK"
        if not is_zip:
            raise DataError(
                f"{path}: Joestar reads .npz archives and tables ({', '.join((*TEXT, *PARQUET))}, or .gz behind "
                "those of text); by its name this is neither. Rename it, or read it yourself and give "
                "joestar.data.from_tables the columns."
            )


def _how_to_convert(folder: Path) -> str | None:
    """What to do with a folder that ``joestar convert`` reads, and ``load`` does not."""
    whole = f"joestar convert {folder} OUT, and load OUT."
    if (folder / CITATIONS).is_file():
        return f"a dataset folder of MAG240M is read once it is converted: {whole}"
    return (
        f"a folder with edges.npy is read once it is converted: {whole}" if (folder / "edges.npy").is_file() else None
    )


def _official_name(name: str) -> str:
    """``ogbn-products`` for ``ogbn_products`` and ``ogbn_products_pyg``; other names as they are."""
    for known in ogb.SCHEMES:
        if name in ogb.folder_names(known):
            return known
    return name


def _not_found(name: str, path: Path, root: str | os.PathLike | None) -> str:
    places = ", ".join(str(place) for place in _roots(root))
    looked = f"No dataset {name!r}: it is no bundled dataset ({', '.join(BUNDLED)}), "
    convertible = next((c for c in (path, *_candidates(name, root)) if _how_to_convert(c)), None)
    if convertible is not None:
        return f"{convertible}: {_how_to_convert(convertible)}"
    if path.exists():
        return (
            looked + f"and the folder {path} holds neither meta.json (a graph written by joestar.data.save) nor raw/ "
            "(a dataset of OGB) nor edges.csv."
        )
    looked += f"no file or folder of that name, and nothing was found under {places}."
    official = _official_name(name)
    if official in ogb.SCHEMES:
        return f"{looked} {ogb.how_to_get(official, _roots(root)[0])}"
    known = [*BUNDLED, *ogb.SCHEMES]
    close = difflib.get_close_matches(name, known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"{looked}{guess} Known names: {', '.join(known)}, 'pyg:Planetoid/Cora' and others of those packages; or give "
        "the path of a .npz file, a table or a folder."
    )


def _resplit(graph: Graph, options: Options, path: Path) -> Graph:
    """The split a converted folder was saved with, or a new random one."""
    has_split = any(getattr(graph, f"{part}_idx") is not None for part in PARTS)  # of one part: others are not made up
    split = options.split
    if has_split and (split in ("auto", "official")):
        return graph
    if split == "official":
        raise DataError(f"{path}: it was saved without a split. Use split='random', which is 60/20/20 by the seed.")
    for part, ids in drawn_split(graph, options).items():
        setattr(graph, f"{part}_idx", ids)
    return graph
