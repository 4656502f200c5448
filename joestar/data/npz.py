"""Graphs in one compressed NumPy archive.

| key | content |
|---|---|
| ``edge_index`` | integers ``[2, E]``: row 0 sources, row 1 destinations |
| ``symmetric`` | optional: 1 if every edge is there in both directions; 0 or absent: reverses are added on loading |
| ``y`` | class ids ``[N]`` or ``[N, 1]``, targets for regression (floats) ``[N]``, or targets ``[N, T]`` |
| ``x`` | dense features ``[N, F]``, standardised per column on loading; absent: the graph has no features |
| ``x_indptr``, ``x_indices``, ``x_data``, ``x_shape`` | instead of ``x``: sparse features in CSR, see below |
| ``edge_weight``, ``edge_attr`` | optional: numbers ``[E]``, ``[E]`` or ``[E, D]``; reverses have those of their edge |
| ``train_idx``, ``val_idx``, ``test_idx`` | the official split; optional, all or none |

Without ``y`` the graph has no labels; one of ``x`` and ``y`` is there. Duplicate edges and self-loops are dropped
unless the caller chooses otherwise. Sparse features become dense float32 rows, each divided by the square root of its
sum. Other keys are not read, and named.
"""

from pathlib import Path

import numpy as np

from joestar.data.archive import DAMAGED, check_members
from joestar.data.float32 import in_float32
from joestar.data.parts import Options, Parts
from joestar.data.splits import PARTS
from joestar.data.standardise import standardised
from joestar.data.structure import EdgeRules, make_structure
from joestar.errors import DataError
from joestar.graph_api.arrays import from_array

SPARSE_KEYS = ("x_indptr", "x_indices", "x_data", "x_shape")
SPLIT_KEYS = tuple(f"{part}_idx" for part in PARTS)
EDGE_KEYS = ("edge_weight", "edge_attr")
KNOWN = {"edge_index", "symmetric", "y", "x", *SPARSE_KEYS, *SPLIT_KEYS, *EDGE_KEYS}


def read_npz(path: Path, options: Options) -> Parts:
    """Reads the archive at ``path``; the format is this module's docstring.

    Raises:
        DataError: the file is no archive, a key is missing, or an array has the wrong shape or dtype.
    """
    where = str(path)
    arrays = _open(path)
    _require(arrays, ("edge_index",), where)
    edges = arrays["edge_index"]
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise DataError(f"{where}: edge_index must be integers [2, E]; got {edges.dtype} {list(edges.shape)}.")
    x, y = _features(arrays, where), arrays.get("y")
    if x is None and y is None:
        raise DataError(
            f"{where}: neither 'x' nor 'y' is there, which say how many nodes there are; the file has "
            f"{', '.join(sorted(arrays))}."
        )
    if y is not None and y.ndim == 0:
        raise DataError(f"{where}: y must have one row per node; got a single value.")
    symmetric = arrays.get("symmetric", np.uint8(0))
    if symmetric.size != 1 or symmetric.dtype.kind not in "iub" or int(symmetric.reshape(())) not in (0, 1):
        raise DataError(f"{where}: symmetric must be 0 or 1; got {symmetric}.")
    edata = {key: _edge_data(arrays[key], key, edges.shape[1], where) for key in EDGE_KEYS if key in arrays}
    rules = options.rules(EdgeRules(undirected=not symmetric))
    edges = from_array(edges, f"{where}: edge_index", DataError).numpy()  # unsigned numbers as int64
    structure = make_structure(edges[0], edges[1], len(x if y is None else y), rules, where, order=bool(edata))
    notes = []
    if symmetric and structure.one_way and options.undirected is None:
        notes.append(f"symmetric is 1, but {structure.one_way:,} edges have no reverse (undirected=True adds them).")
    others = sorted(arrays.keys() - KNOWN)
    if others:
        notes.append(f"keys that are not read: {', '.join(map(repr, others))}; read are {', '.join(sorted(KNOWN))}.")
    if x is None:
        notes.append("no key 'x': the graph has no features (joestar.nn.NodeEmbedding learns some).")
    if y is None:
        notes.append("no key 'y': the graph has no labels.")
    return Parts(where, path.stem, structure, x, y, _splits(arrays, where), edata, notes)


def _edge_data(values: np.ndarray, key: str, edges: int, where: str) -> np.ndarray:
    allowed = (1,) if key == "edge_weight" else (1, 2)
    if values.dtype.kind not in "iufb" or values.ndim not in allowed or len(values) != edges:
        form = "[E]" if key == "edge_weight" else "[E] or [E, D]"
        raise DataError(
            f"{where}: {key} must be numbers {form} with E = {edges}, as edge_index; got {values.dtype} "
            f"{list(values.shape)}."
        )
    if not np.isfinite(values).all():
        raise DataError(f"{where}: {key} must be finite, but row {np.argwhere(~np.isfinite(values))[0][0]} is not.")
    return in_float32(values, f"{where}: {key}")


def _open(path: Path) -> dict[str, np.ndarray]:
    try:
        check_members(path)
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except DAMAGED as error:
        raise DataError(
            f"{path}: expected a NumPy archive of plain arrays, but it cannot be read ({error}). "
            "Write it with numpy.savez_compressed."
        ) from error


def _require(arrays: dict, keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise DataError(f"{where}: the key {missing[0]!r} is missing; the file has {', '.join(sorted(arrays))}.")


def _splits(arrays: dict, where: str) -> dict[str, np.ndarray]:
    if not any(key in arrays for key in SPLIT_KEYS):
        return {}
    _require(arrays, SPLIT_KEYS, where)
    return {part: arrays[key] for part, key in zip(PARTS, SPLIT_KEYS, strict=True)}


def _features(arrays: dict, where: str) -> np.ndarray | None:
    if "x" not in arrays and not any(key in arrays for key in SPARSE_KEYS):
        return None
    if "x" in arrays:
        x = arrays["x"]
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            raise DataError(f"{where}: x must be numbers [N, F]; got {x.dtype} {list(x.shape)}.")
        _check_finite(x, where)
        return standardised(x, where)
    _require(arrays, SPARSE_KEYS, where)
    _check_finite(arrays["x_data"], where)
    return _dense_rows(*(arrays[key] for key in SPARSE_KEYS), where)


def _check_finite(x: np.ndarray, where: str) -> None:
    finite = np.isfinite(x)
    if finite.all():
        return
    first = np.unravel_index(int(np.argmin(finite)), x.shape)
    place = f"in row {first[0]}, column {first[1]}" if x.ndim == 2 else f"entry {first[0]} of x_data"
    raise DataError(
        f"{where}: features must be finite, but {int((~finite).sum()):,} are NaN or infinite, the first {place}."
    )


def _dense_rows(indptr: np.ndarray, columns: np.ndarray, data: np.ndarray, shape: np.ndarray, where: str) -> np.ndarray:
    """CSR to float32 rows, each divided by the square root of its sum where that is positive."""
    if shape.shape != (2,):
        raise DataError(f"{where}: x_shape must hold two numbers; got {shape}.")
    rows, width = (int(size) for size in shape)
    counts = np.diff(indptr)
    if len(indptr) != rows + 1 or (counts < 0).any() or not (indptr[-1] == len(columns) == len(data)):
        raise DataError(
            f"{where}: x_indptr, x_indices and x_data do not form a CSR matrix of shape [{rows}, {width}]: "
            f"x_indptr has {len(indptr)} entries and ends at {indptr[-1] if len(indptr) else 'nothing'}, x_indices has "
            f"{len(columns)} entries, x_data {len(data)}."
        )
    if len(columns) and not 0 <= columns.min() <= columns.max() < width:
        raise DataError(f"{where}: x_indices must lie in 0..{width - 1}; got {columns.min()}..{columns.max()}.")
    row_of = np.repeat(np.arange(rows), counts)
    sums = np.bincount(row_of, weights=data, minlength=rows)
    scale = np.where(sums > 0, sums, 1) ** -0.5
    made = np.zeros((rows, width), dtype=np.float32)
    np.add.at(made, (row_of, columns), in_float32(data * scale[row_of], f"{where}: features"))
    return made
