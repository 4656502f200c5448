"""Choices on disk: files that pin them, and the cache of what the tuner found.

A pinned file is written by ``step.save_choices(path)`` and read by ``joestar.compile(choices=path)``. The cache is the
folder ``choices`` in the cache folder (``JOESTAR_CACHE``, else ``joestar`` in ``XDG_CACHE_HOME`` or ``~/.cache``), with
a file per key: writers of different results never meet, and a file is written beside and renamed. A cache that cannot
be read or written is no error: then the tuner measures again.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from joestar.cache import cache_folder
from joestar.errors import ConfigError
from joestar.ops.digest import source_digest
from joestar.profile.files import write_text
from joestar.profile.ledger import CandidateRecord

FORMAT = 1


@dataclass(frozen=True)
class Pinned:
    """Choices from outside: ``"kind:name" -> option``, and the slack of bounds, ``None`` if it is left open."""

    choices: dict[str, str] = field(default_factory=dict)
    slack: float | None = None


def pinned(given: Mapping[str, str] | str | os.PathLike | None) -> Pinned:
    """What ``joestar.compile(choices=)`` was given: nothing, a mapping, or the path of a file.

    Raises:
        ConfigError: if the file cannot be read, or is none that ``save`` wrote.
    """
    if given is None:
        return Pinned()
    if isinstance(given, (str, os.PathLike)):
        return _read(Path(given))
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"choices must be a mapping 'kind:name' -> option or the path of a file; got {type(given).__name__}."
        )
    return Pinned(_checked(given, "choices"))


def save(path: str | os.PathLike, choices: Mapping[str, str], slack: float) -> None:
    """Writes a file for ``pinned``; a reader finds the old one or the new one.

    Raises:
        ConfigError: if it cannot be written.
    """
    content = {"format": FORMAT, "choices": dict(choices), "slack": slack}
    write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _read(path: Path) -> Pinned:
    again = "Write one with step.save_choices(path)."
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"choices: {path} cannot be read ({error.strerror or error}). {again}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"choices: {path} is no JSON ({error}). {again}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"choices: {path} must be a file of format {FORMAT}; got {found!r}. {again}")
    slack = content.get("slack")
    if slack is not None and not _is_amount(slack):
        raise ConfigError(f"choices: the slack in {path} must be a number of at least 0; got {slack!r}.")
    return Pinned(_checked(content.get("choices"), f"choices in {path}"), slack)


def _is_amount(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _checked(choices, name: str) -> dict[str, str]:
    if not isinstance(choices, Mapping) or not all(isinstance(v, str) for pair in choices.items() for v in pair):
        raise ConfigError(f"{name} must map 'kind:name' to an option, both strings; got {choices!r}.")
    return dict(choices)


# --- the tuner's cache ---


@dataclass(frozen=True)
class Found:
    """A result of the tuner: the choices that differ from the defaults, the slack, and what was tried."""

    choices: dict[str, str]
    slack: float
    candidates: list[CandidateRecord]


def choices_folder() -> Path:
    """Where results are stored."""
    return cache_folder() / "choices"


def cache_key(facts: Mapping) -> str:
    """Hash of everything that a result depends on, our code included; ``facts`` must have a JSON form."""
    return hashlib.sha256(json.dumps([source_digest(), facts], sort_keys=True).encode()).hexdigest()[:32]


def recall(key: str) -> Found | None:
    """The stored result; ``None`` if there is none, or it is damaged or of another format."""
    try:
        content = json.loads((choices_folder() / f"{key}.json").read_text())
        if content["format"] != FORMAT or not isinstance(content["candidates"], list):
            return None
        candidates = [CandidateRecord(**candidate) for candidate in content["candidates"]]
        found = Found(_checked(content["choices"], "choices"), content["slack"], candidates)
        return found if _can_be(found) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _can_be(found: Found) -> bool:
    """Whether it may be a result of the tuner's, in which what won is one of what was timed."""
    won = [(each.choices, each.slack) for each in found.candidates if each.taken]
    return all(map(_is_candidate, found.candidates)) and won == [(found.choices, found.slack)]


def _is_candidate(record: CandidateRecord) -> bool:
    _checked(record.choices, "choices")
    timed = all(each is None or _is_amount(each) for each in (record.eager_ms, record.compiled_ms))
    return timed and _is_amount(record.slack) and isinstance(record.taken, bool)


def remember(key: str, found: Found, facts: Mapping) -> None:
    """Stores a result with the facts behind its key, for people to read; without effect if that fails."""
    content = {"format": FORMAT, **asdict(found), "facts": facts}
    with contextlib.suppress(OSError, ConfigError):
        folder = choices_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{key}.json", json.dumps(content, indent=1, sort_keys=True) + "\n")
