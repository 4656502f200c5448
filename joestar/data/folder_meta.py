"""``meta.json`` of a converted folder: what is in it, checked before anything is mapped."""

import json
from pathlib import Path
from typing import Any

from joestar import __version__
from joestar.errors import DataError

FORMAT = "joestar-graph"
VERSION = 2
"""Version 1 had neither sizes nor checksums; it is still read."""
META = "meta.json"
JOURNAL = "journal.json"
"""Lies in the folder of a conversion that has not ended."""
PARTIAL = ".partial-"
"""Folders that are being written are called ``NAME.partial-...``."""
ATTRIBUTES = ("name", "num_classes", "multilabel", "class_names")
AGAIN = "Write the folder again."


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
            f"{folder}: this graph is half-written: whatever wrote it has not ended. Run the same `joestar convert` "
            "again, which goes on where it was, or remove the folder."
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
    _check_arrays(folder, meta["arrays"])
    return meta


def _check_version(meta: dict, path: Path) -> None:
    version = meta.get("version")
    if isinstance(version, int) and 1 <= version <= VERSION:
        return
    if isinstance(version, int) and version > VERSION:
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
