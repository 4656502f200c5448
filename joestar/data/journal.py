"""What a conversion has done so far: a file in its folder, so that it goes on after it was killed.

Only what the running system has in its caches is trusted: after a crash of the machine a conversion begins anew.
"""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joestar.data.folder_meta import JOURNAL
from joestar.data.folder_writer import write_json
from joestar.errors import DataError

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """States by phase, plain JSON, written as a whole by ``save``.

    Args:
        request: what is asked for; a journal of another request is not gone on with.

    Raises:
        DataError: another process writes into the folder.
    """

    def __init__(self, folder: Path, request: dict[str, Any]):
        self.path = folder / JOURNAL
        self.lock = open(folder / "journal.lock", "w")  # noqa: SIM115 - held until `close`
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise DataError(f"{folder}: another conversion of the same data is writing here. Wait for it.") from None
        head = {"request": json.loads(json.dumps(request)), "boot": BOOT.read_text() if BOOT.exists() else ""}
        self.content = self._read()
        self.resumed = all(self.content.get(key) == value for key, value in head.items())
        if not self.resumed:
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

    def close(self) -> None:
        """Lets others write."""
        self.lock.close()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
