"""Result files: written beside and renamed, so that a reader finds a whole file or none."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joestar.errors import ConfigError


def write_text(path: str | Path, text: str) -> None:
    """Writes ``text`` as UTF-8."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path: str | Path, write: Callable[[Any], Any]) -> None:
    """Calls ``write`` with a binary file beside ``path``, then renames it to ``path``.

    Raises:
        ConfigError: if the file cannot be written.
    """
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
