"""Source lines and places, for people: taken apart, shortened, and equal ones merged."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from joestar.profile.ledger import PlaceSummary

SOURCE = re.compile(r"^(?P<file>.*?):(?P<line>\d+) in (?P<function>.*?): (?P<code>.*)$", re.DOTALL)
PARTS = 3
"""Last parts of a file's path that are shown."""


def place(source: str) -> dict[str, str]:
    """A source line, taken apart: ``where`` (the file's last parts and the line), ``function``, ``code``, ``full``."""
    match = SOURCE.match(source)
    if match is None:
        return {"where": source, "function": "", "code": "", "full": source}
    where = "/".join(Path(match["file"]).parts[-PARTS:])
    return {
        "where": f"{where}:{match['line']}", "function": match["function"], "code": match["code"],
        "full": f"{match['file']}:{match['line']}",
    }  # fmt: skip


def short_line(source: str) -> str:
    """``model.py:45``, or nothing for what is no source line."""
    match = SOURCE.match(source)
    return f"{os.path.basename(match['file'])}:{match['line']}" if match else ""


@dataclass
class Merged:
    """Places that say the same, in the order of the first: how many, and their nodes and layers."""

    place: PlaceSummary
    nodes: list[str]
    layers: list[str]

    @property
    def times(self) -> int:
        """How many they are."""
        return len(self.nodes)


def merged(places: list[PlaceSummary]) -> list[Merged]:
    """Places of the same pattern, verdict, text and line, once each."""
    found: dict[tuple, Merged] = {}
    for spot in places:
        row = found.setdefault(
            (spot.pattern, spot.verdict, spot.detail, spot.source), Merged(spot, [], [])
        )  # fmt: skip
        row.nodes.append(spot.node)
        if spot.layer and spot.layer not in row.layers:
            row.layers.append(spot.layer)
    return list(found.values())
