"""What a step says of itself: the report, choices to be kept, where patterns fired."""

import os

from joestar.errors import ConfigError
from joestar.profile.choices import save
from joestar.profile.environment import Environment
from joestar.profile.ledger import Report
from joestar.profile.summary import program_record
from joestar.profile.view import explain


class Explained:
    """The part of a ``Step`` that tells what was captured, fused, chosen, padded and redone."""

    def __repr__(self) -> str:
        kinds = ", ".join(kind for kind, executor in self._executors.items() if executor.program.captured)
        how = f"{self._run['execution']} on {self.graph.device}, backend {self._options.backend}"
        return f"Step({type(self.model).__name__}, {self.sampler!r}, {how}, programs: {kinds or 'none captured yet'})"

    def report(self) -> Report:
        """What was fused, chosen, padded and redone, and where the time went."""
        return Report(
            Environment.of(self.graph.device), type(self.model).__name__, repr(self.sampler), self._options.backend,
            self._run["execution"], self._records(), self.counters, graph=repr(self.graph), tuning=self._tuning,
        )  # fmt: skip

    def save_choices(self, path: str | os.PathLike) -> None:
        """Writes every choice of the training program (without a loss: of the one that ran), and the slack of bounds.

        ``joestar.compile(choices=path)`` takes them over; then nothing is chosen or timed.

        Raises:
            ConfigError: before the first step, when nothing was chosen yet, and if the file cannot be written.
        """
        for executor in self._executors.values():
            if executor.program.captured is not None:
                save(path, {site.key: site.taken for site in executor.program.sites}, executor.slack)
                return
        raise ConfigError("nothing was chosen yet: run a step before save_choices.")

    def explain(self) -> str:
        """Every place where a pattern fired or was refused, with the reason and the line of the user's code."""
        return explain(self._records())

    def _records(self) -> list:
        """Of every program that was captured."""
        return [program_record(executor) for executor in self._executors.values() if executor.program.captured]
