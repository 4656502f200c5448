"""Files that are whole or not there."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from joestar.errors import DataError


def write_beside(target: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Calls ``write`` with a file beside ``target``, brings it to the disk, then renames it.

    Raises:
        DataError: it cannot be written; what was at ``target`` is still there.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error}). Is there space, and permission?") from error
    finally:
        temporary.unlink(missing_ok=True)
