"""What a conversion has done so far: a file in its folder, so that it goes on after it was killed.

Only what the running system has in its caches is trusted: after a crash of the machine a conversion begins anew.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joestar.data.folder_meta import JOURNAL, META
from joestar.data.folder_writer import write_json

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """States by phase, plain JSON, written as a whole by ``save``.

    Args:
        request: what is asked for; a journal of another request is not gone on with.

    Attributes:
        complete: whether nothing is left to do but to name the folder. resumed: whether something was done already.
    """

    def __init__(self, folder: Path, request: dict[str, Any]):
        self.path = folder / JOURNAL
        head = {"request": json.loads(json.dumps(request)), "boot": BOOT.read_text() if BOOT.exists() else ""}
        self.content, self.complete = self._read(), (folder / META).is_file()
        self.resumed = all(self.content.get(key) == value for key, value in head.items())
        if not self.resumed and not self.complete:
            self.content = {**head, "states": {}}
            self.save()

    def state(self, phase: str, initial: dict[str, Any]) -> dict[str, Any]:
        """The state of a phase, to be changed in place."""
        return self.content["states"].setdefault(phase, initial)

    def once(self, phase: str, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, plain JSON; it is not done again when the conversion goes on."""
        state = self.state(phase, {})
        if "result" not in state:
            state["result"] = work()
            self.save()
        return state["result"]

    def save(self) -> None:
        """Writes the states."""
        write_json(self.path, self.content, lasting=False)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
