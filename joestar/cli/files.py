"""Result files of the commands."""

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from joestar.errors import ConfigError
from joestar.profile.files import write_text, write_whole


def check_writable(path: str | None, flag: str) -> None:
    """Raises ``ConfigError`` before the training rather than after it if ``path`` cannot be written."""
    if path is None:
        return
    target = Path(path)
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "it is a folder" if target.is_dir() else f"{folder} is not a folder that can be written to"
        raise ConfigError(f"{flag} {path}: expected the path of a file; {reason}.")


def check_outputs(
    outputs: Mapping[str, str | None], read: Mapping[str, object] | None = None, checkpoints: str | None = None
) -> None:  # fmt: skip
    """Raises ``ConfigError`` before the work if an output cannot be written, or is a file of something else.

    Args:
        outputs: paths by flag. read: files and folders that the command reads, as messages call them; of what is
            neither there is nothing to lose.
        checkpoints: the folder that checkpoints are written to.
    """
    taken = {os.path.realpath(file): what for what, path in (read or {}).items() if path for file in _files(Path(path))}
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
        folder, name = os.path.split(place)
        if checkpoints is not None and os.path.realpath(checkpoints) == folder and fnmatch(name, "checkpoint-*.pt"):
            raise ConfigError(f"{flag} {path}: --checkpoints has files of that name. Give another one.")


GRAPHS = ("edges.*", "nodes.*", "features.npy", "labels.npy", "*_idx.npy", "ind*.npy", "[en]data.*.npy", "meta.json")
"""Files of folders that ``joestar.load`` reads."""


def _files(path: Path) -> list[Path]:
    path = path.expanduser()
    return [path] if path.is_file() else [file for form in GRAPHS for file in path.glob(form)]


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` as JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_checkpoint(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` for ``torch.load``."""
    write_whole(path, lambda file: torch.save(content, file))
