"""Result files: written beside and renamed, so that a reader finds a whole file or none; links stay."""

import json
import math
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joestar.errors import ConfigError


def as_json(content: Any) -> str:
    """Indented JSON; numbers that are NaN or infinite, for which it has no word, are ``null``."""
    return json.dumps(_finite(content), indent=2, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_text(path: str | Path, text: str) -> None:
    """Writes ``text`` as UTF-8."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path: str | Path, write: Callable[[Any], Any]) -> None:
    """Calls ``write`` with a binary file beside ``path``, then renames it to ``path``, or to what that links to.

    Raises:
        ConfigError: if the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be written ({error}). Is there space, and permission?") from error
    finally:
        temporary.unlink(missing_ok=True)
