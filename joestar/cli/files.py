"""Result files of the commands."""

import json
import os
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


def write_json(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` as JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_checkpoint(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` for ``torch.load``."""
    write_whole(path, lambda file: torch.save(content, file))
