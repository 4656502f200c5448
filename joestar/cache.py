"""Where what was measured is kept for later processes: launch settings, speeds, choices."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``JOESTAR_CACHE``, else ``joestar`` in ``XDG_CACHE_HOME`` or ``~/.cache``; what is empty counts as not set."""
    own = os.environ.get("JOESTAR_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joestar")
