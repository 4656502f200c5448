"""Result files of the commands."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from joestar.errors import ConfigError
from joestar.profile.files import as_json, write_text, write_whole


def check_writable(path: str | None, flag: str) -> None:
    """Raises ``ConfigError`` before the training rather than after it if ``path`` cannot be written."""
    if path is None:
        return
    target = Path(os.path.realpath(path))
    folder, reason = target.parent, None
    if target.is_dir():
        reason = "it is a folder"
    elif _is_special(path):
        reason = "it is a device or a pipe, which a file would replace"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = f"{folder} is not a folder that can be written to"
    if reason is not None:
        raise ConfigError(f"{flag} {path}: expected the path of a file; {reason}.")


def _is_special(path: str) -> bool:
    """Whether it is what a file must not take the place of, by itself or by the name of an open one."""
    place = os.path.abspath(path)
    named = place in ("/dev/stdin", "/dev/stdout", "/dev/stderr") or place.startswith(("/dev/fd/", "/proc/"))
    return named or (os.path.exists(path) and not os.path.isfile(path))


def check_outputs(
    outputs: Mapping[str, str | None], read: Mapping[str, object] | None = None, checkpoints: str | None = None
) -> None:  # fmt: skip
    """Raises ``ConfigError`` before the work if an output cannot be written, or is a file of something else.

    Args:
        outputs: paths by flag. read: files and folders that the command reads, as messages call them; nothing is
            written into such a folder, unless it is one of tables, beside which other files may lie. Of what is neither
            there is nothing to lose.
        checkpoints: the folder that checkpoints are written to.
    """
    sources = {
        what: place for what, path in (read or {}).items() if path and (place := Path(path).expanduser()).exists()
    }
    taken = {}
    if checkpoints is not None:
        taken[os.path.realpath(checkpoints)] = "--checkpoints"
    for flag, path in outputs.items():
        if path is None:
            continue
        check_writable(path, flag)
        place = os.path.realpath(path)
        if place in taken:
            raise ConfigError(f"{flag} {path}: this is what {taken[place]} names already. Give another file.")
        taken[place] = flag
        for what, source in sources.items():
            if _is_read(Path(place), source):
                raise ConfigError(
                    f"{flag} {path}: this is what {what} names already, or part of it. Give another file."
                )
        folder, name = os.path.split(place)
        if checkpoints is not None and os.path.realpath(checkpoints) == folder and fnmatch(name, "checkpoint-*.pt"):
            raise ConfigError(f"{flag} {path}: --checkpoints has files of that name. Give another one.")


def check_report(path: str | None, dataset: str | None) -> None:
    """``check_outputs`` of the ``--json`` of a measurement, on a dataset or on none."""
    check_outputs({"--json": path}, {} if dataset is None else {"the dataset": place_of(dataset, None)})


def place_of(dataset: str, root: str | os.PathLike | None) -> Path | None:
    """The file or folder of a dataset, for ``check_outputs``."""
    from joestar.data.load import place_of

    return place_of(dataset, root)


TABLES = ("edges.*", "nodes.*", "features.npy", "labels.npy", "*_idx.npy")
"""Files of a folder of tables that commands read."""


def _is_read(place: Path, source: Path) -> bool:
    """Whether a file, links followed, is what is read, or lies in it, or would be read with it."""
    inside = list(source.iterdir()) if source.is_dir() else []
    if any(fnmatch(file.name, "edges.*") for file in inside) and not (source / "meta.json").is_file():
        inside = [file for file in inside if _is_of_tables(file)]
        if source.resolve() == place.parent and _is_of_tables(place):
            return True
    else:
        inside.append(source)
    return any(kept in (place, *place.parents) for kept in (file.resolve() for file in inside))


def _is_of_tables(file: Path) -> bool:
    return any(fnmatch(file.name, form) for form in TABLES)


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` as JSON; ``null`` for what is NaN or infinite."""
    write_text(path, as_json(content) + "\n")


def write_checkpoint(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` for ``torch.load``."""
    write_whole(path, lambda file: torch.save(content, file))
