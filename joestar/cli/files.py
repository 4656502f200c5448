"""Result files: written beside and renamed, so that a reader finds a whole file or none."""

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from joestar.errors import ConfigError


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
    text = json.dumps(content, indent=2) + "\n"
    _replace(path, lambda file: file.write(text.encode()))


def write_checkpoint(path: str, content: dict[str, Any]) -> None:
    """Writes ``content`` for ``torch.load``."""
    _replace(path, lambda file: torch.save(content, file))


def _replace(path: str, write: Callable[[Any], Any]) -> None:
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be written ({error}). Is there space, and permission?") from error
    finally:
        temporary.unlink(missing_ok=True)
