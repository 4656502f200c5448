"""``meta.json`` of a converted folder: what is in it, checked before anything is mapped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joestar import __version__
from joestar.errors import DataError
from joestar.whole_numbers import is_whole

FORMAT = "joestar-graph"
VERSION = 2
"""Version 1 had neither sizes nor checksums; it is still read."""
META = "meta.json"
JOURNAL = "journal.json"
"""Lies in the folder of a conversion that has not ended."""
PARTIAL = ".partial-"
"""Folders that are being written are called ``NAME.partial-...``."""
ATTRIBUTES = ("name", "num_classes", "multilabel", "class_names", "feature_names")
AGAIN = "Write the folder again."
DEGREES = ("min", "median", "mean", "max", "isolated")


def is_converted(folder: Path) -> bool:
    """True if ``folder`` is one of a converted graph, or of one that was left half-written."""
    return (folder / META).is_file() or is_partial(folder)


def is_partial(folder: Path) -> bool:
    """True if ``folder`` was being written by ``save``, ``generate`` or ``convert``."""
    return folder.is_dir() and (PARTIAL in folder.name or (folder / JOURNAL).is_file())


def new_meta(arrays: dict[str, dict], **facts: Any) -> dict[str, Any]:
    """The content of ``meta.json``.

    Args:
        arrays: shape, dtype, bytes and sha256 of every file. facts: name, num_classes, directed, source, ...
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": f"joestar {__version__}",
        **facts,
        "arrays": dict(sorted(arrays.items())),
    }


def read_meta(folder: Path) -> dict[str, Any]:
    """``meta.json``, once everything about it and the sizes of the files are as they should be.

    Raises:
        DataError: the folder is half-written, foreign, of a newer version or damaged.
    """
    path = folder / META
    if is_partial(folder):
        raise DataError(
            f"{folder}: this graph is half-written: whatever wrote it has not ended. Run the same command again "
            "(`joestar convert` goes on where it was, `joestar generate` begins anew), or remove the folder."
        )
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: expected JSON, but it cannot be read ({error}). {AGAIN}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(
            f'{path}: expected the description of a Joestar graph ("format": {FORMAT!r}); this is another program\'s. '
            "Convert it with `joestar convert`, or choose another folder."
        )
    _check_version(meta, path)
    absent = {"name", "num_classes", "multilabel", "arrays"} - meta.keys()
    if absent:
        raise DataError(f"{path}: the key {sorted(absent)[0]!r} is missing. {AGAIN}")
    _check_facts(meta, path)
    _check_arrays(folder, meta["arrays"])
    return meta


def _is_count(value: Any) -> bool:
    return is_whole(value) and value >= 0


def _is_list_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_degrees(value: Any) -> bool:
    numbers = isinstance(value, dict) and [value.get(name) for name in DEGREES]
    return bool(numbers) and all(is_whole(number) or isinstance(number, float) for number in numbers)


def _is_source(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("generated", {}), dict)


_FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "name": ("text or null", lambda value: value is None or _is_text(value)),
    "num_classes": ("a whole number or null", lambda value: value is None or _is_count(value)),
    "multilabel": ("true or false", lambda value: isinstance(value, bool)),
    "class_names": ("a list of text or null", lambda value: value is None or _is_list_of(value, _is_text)),
    "feature_names": ("a list of text or null", lambda value: value is None or _is_list_of(value, _is_text)),
    "in_degree": (f"the numbers {', '.join(DEGREES)}", _are_degrees),
    "self_loops": ("a whole number", _is_count),
    "directed": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "source": ("an object or null", lambda value: value is None or _is_source(value)),
    "written_by": ("text", _is_text),
}
"""What the facts of a graph must be, where they are there."""
_ENTRY: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "shape": ("a list of whole numbers", lambda value: _is_list_of(value, _is_count)),
    "dtype": ("text", _is_text),
    "bytes": ("a whole number", _is_count),
    "sha256": ("text", _is_text),
}


def _check_facts(meta: dict, path: Path) -> None:
    _check_kinds(meta, _FACTS, str(path))
    names, number = meta.get("class_names"), meta["num_classes"]
    if names is not None and number is not None and len(names) != number:
        raise DataError(f"{path}: class_names has {len(names)} names, but num_classes is {number}. {AGAIN}")


def _check_kinds(found: dict, kinds: dict[str, tuple[str, Callable[[Any], bool]]], where: str) -> None:
    for key, (what, fits) in kinds.items():
        if key in found and not fits(found[key]):
            raise DataError(f"{where}: {key} must be {what}; got {found[key]!r}. {AGAIN}")


def _check_version(meta: dict, path: Path) -> None:
    version = meta.get("version")
    if is_whole(version) and 1 <= version <= VERSION:
        return
    if is_whole(version) and version > VERSION:
        raise DataError(
            f"{path}: version {version} of the format, by {meta.get('written_by', 'a newer Joestar')}; this is joestar "
            f"{__version__}, which reads up to version {VERSION}. Update Joestar, or write the folder with this one."
        )
    raise DataError(f"{path}: expected a version of the format from 1 to {VERSION}; got {version!r}. {AGAIN}")


def _check_arrays(folder: Path, arrays: Any) -> None:
    """Raises unless every array is described, and its file there in full."""
    path = folder / META
    if not isinstance(arrays, dict):
        raise DataError(f"{path}: expected the arrays by name; got {type(arrays).__name__}. {AGAIN}")
    for key in ("indptr", "indices"):
        if key not in arrays:
            raise DataError(f"{path}: the array {key!r} is missing. {AGAIN}")
    for key, entry in arrays.items():
        if not isinstance(entry, dict) or not {"shape", "dtype"} <= entry.keys() or "/" in key:
            raise DataError(f"{path}: expected shape and dtype of the array {key!r}; got {entry!r}. {AGAIN}")
        _check_kinds(entry, _ENTRY, f"{path}: the array {key!r}")
        file = folder / f"{key}.npy"
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(f"{file}: expected the array {key!r}, but it cannot be read ({error}).") from error
        if size != entry.get("bytes", size):
            what = "truncated" if size < entry["bytes"] else "too long"
            raise DataError(
                f"{file}: the file is {what}: meta.json says {entry['bytes']:,} bytes, but there are {size:,}. Copy it "
                "again, or write the folder again."
            )
