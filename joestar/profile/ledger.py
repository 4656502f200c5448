"""The ledger: everything the system decided or observed, as one tree of dataclasses. JSON is its form."""

import json
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from joestar.errors import ConfigError
from joestar.profile.environment import Environment
from joestar.profile.files import as_json, write_text
from joestar.profile.tree import rebuilt

CHOSEN = re.compile(r"\bis chosen\b")
"""How passes word that both forms are correct, and the other one is taken."""
FIRST_BACKWARD = "first backward"
"""Clock of backward passes that are the first of their program: they compile it."""
BETWEEN = "between kernels"
"""Name under which the host's time outside of kernels is listed: Python, autograd, launches."""


@dataclass
class SetRecord:
    """A set of data-dependent size: what it is, sizes seen, its bound, and the share of it that is padding.

    ``stored`` is false for a set that no kernel writes: it is sampled and aggregated in one, and has no bound.
    """

    name: str
    seen: int
    minimum: int
    mean: float
    maximum: int
    bound: int | None
    waste: float | None
    stored: bool = True


@dataclass
class PassSummary:
    """One row of the pass table: rewrites, nodes before and after, milliseconds, left out or not."""

    name: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    skipped: bool


@dataclass
class PlaceSummary:
    """A place where a pattern fired or did not, with the reason, the user's source line and the layer (its name)."""

    pattern: str
    node: str
    fired: bool
    detail: str
    source: str
    layer: str = ""

    @property
    def verdict(self) -> str:
        """``fired``; ``chosen`` where another correct form is taken; ``refused`` where the pattern may not fire."""
        return "fired" if self.fired else "chosen" if CHOSEN.search(self.detail) else "refused"


@dataclass
class SiteRecord:
    """A place where several forms are correct: its key, the options, the default, the one taken, the source line."""

    key: str
    options: list[str]
    default: str
    taken: str
    source: str


@dataclass
class CandidateRecord:
    """A combination of choices that the tuner timed (thesis 5.3.3).

    Attributes:
        choices: what differs from the defaults, ``"kind:name" -> option``; slack: of its bounds.
        eager_ms, compiled_ms: whole steps without and with the backend's compiler, median; ``None``: not timed.
        taken: whether it won.
    """

    choices: dict[str, str]
    slack: float
    eager_ms: float | None
    compiled_ms: float | None
    taken: bool


@dataclass
class TuningRecord:
    """What the tuner tried, how long it took, and whether the result came from its cache."""

    candidates: list[CandidateRecord]
    seconds: float
    cached: bool
    key: str


@dataclass
class Expected:
    """A figure as it was planned, and as it was measured."""

    what: str
    planned: float
    measured: float


@dataclass
class HistoryRecord:
    """The history of a hidden layer in training over partitions: rows of the table, and what was read of it so far.

    Attributes:
        layer, width: which one, from 0, and its columns. rows, pushed: of the table (of several hosts, this one's); of
            these, those with a value.
        pulled: rows of halo nodes that macro-batches brought; missing: of these, never pushed; too_old: over the bound.
        mean_age, max_age: macro-batches since the push, of the ones that were used.
        halo: nodes whose rows were brought, as a share of all nodes of the macro-batches.
    """

    layer: int
    width: int
    rows: int
    pushed: int
    pulled: int
    missing: int
    too_old: int
    mean_age: float | None
    max_age: int
    halo: float


@dataclass
class FeedingRecord:
    """How a graph in host memory reached the device.

    Attributes:
        plan: in sentences. rows: per as many seeds as a planned macro-batch has; seconds: of all epochs so far, by who
            worked (``steps waited``: for a macro-batch); counts: macro-batches, those that were cut in two for lack of
            room, those loaded alone, those made again.
        epoch: seconds of an epoch, the median of those behind the first, with what the loop does between steps; peak
            memory of the device's allocator.
        history: of hidden rows, in training over partitions.
    """

    plan: str
    rows: list[Expected]
    seconds: dict[str, float]
    counts: dict[str, int]
    epoch: list[Expected] = field(default_factory=list)
    history: list[HistoryRecord] = field(default_factory=list)


@dataclass
class KernelRecord:
    """Time of one kernel per step: name, phase (``sampling``, ``forward``, ``backward``, ``optimizer``), calls.

    Attributes:
        shape: of its operands, for products of matrices; layer: name of the module that it works for (``convs.0``);
        source: line of the user's model, ``file:line in function: code``. Each is empty where it is not known.
    """

    name: str
    phase: str
    microseconds: float
    calls: float
    shape: str = ""
    layer: str = ""
    source: str = ""


@dataclass
class StageRecord:
    """One bar of the ablation (thesis figure 5.14): what is switched on so far, and a step's time, kernels, memory."""

    stage: str
    milliseconds: float
    kernels: float | None
    bytes: int | None


@dataclass
class ProfileRecord:
    """What ``joestar profile`` measured of a training step.

    Attributes:
        milliseconds: of a step, median; p20, p80: its percentiles; steps: timed.
        phases: milliseconds per phase of a step; kernels: the slowest first; stages: the ablation.
        peak_bytes: of memory during a step; logical_bytes: that must move; copy_bandwidth: measured, bytes/s;
        bus: bytes per step per bus (``host to device``, ``device to host``), empty where there is none.
        epoch_steps: steps of an epoch; source: where phases and kernels were read from, in a sentence.
        baselines: the same training without Joestar, where it can be measured; no_baseline: why not, else.
    """

    milliseconds: float
    p20: float
    p80: float
    steps: int
    phases: dict[str, float]
    kernels: list[KernelRecord]
    stages: list[StageRecord]
    peak_bytes: int | None = None
    logical_bytes: int | None = None
    copy_bandwidth: float | None = None
    bus: dict[str, int] = field(default_factory=dict)
    epoch_steps: int | None = None
    source: str = ""
    baselines: list[StageRecord] = field(default_factory=list)
    no_baseline: str = ""

    @property
    def epoch_seconds(self) -> float | None:
        """Time of an epoch at the median step."""
        return None if self.epoch_steps is None else self.epoch_steps * self.milliseconds / 1e3

    @property
    def floor_milliseconds(self) -> float | None:
        """Time that the bytes take at the bandwidth of a copy."""
        if not self.logical_bytes or not self.copy_bandwidth:
            return None
        return self.logical_bytes / self.copy_bandwidth * 1e3


@dataclass
class ProgramRecord:
    """One captured program: its graph before and after the passes, its sizes, and what compiling took (seconds).

    ``slack`` is the share added to the sizes seen when bounds are chosen.
    """

    kind: str
    graph_before: str
    graph_after: str
    passes: list[PassSummary]
    places: list[PlaceSummary]
    sites: list[SiteRecord]
    sets: list[SetRecord]
    batch: int
    compiles: int
    rewrites: dict[str, int]
    seconds: dict[str, float]
    slack: float | None = None


@dataclass
class Counters:
    """What happened at run time; times in seconds, summed over steps; notes are warnings that were given.

    ``prefetched`` counts steps whose samples and rows had been made while the step before them computed.
    """

    steps: int = 0
    exact_steps: int = 0
    overflows: int = 0
    fallbacks: int = 0
    recompiles: int = 0
    captures: int = 0
    warm_up_batches: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    prefetched: int = 0

    @property
    def padded_steps(self) -> int:
        """Steps that ran padded."""
        return self.steps - self.exact_steps

    @property
    def replay_rate(self) -> float | None:
        """Share of the steps that ran as the one padded program; ``None`` before the first step."""
        return self.padded_steps / self.steps if self.steps else None

    def add_time(self, phase: str, seconds: float) -> None:
        """Adds to a phase's total."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


@dataclass
class Report:
    """What ``step.report()`` returns; ``print`` it for tables, or take JSON or one HTML page.

    Attributes:
        graph: its name and sizes; tuning, profile, feeding: ``None`` unless the step was tuned, profiled, or the graph
            is in host memory.
        settings: what it takes to repeat the run, name -> value as text; command: that does so, if there is one;
        date: when the report was made, with the zone.
    """

    environment: Environment
    model: str
    sampler: str
    backend: str
    execution: str
    programs: list[ProgramRecord]
    counters: Counters
    tuning: TuningRecord | None = None
    profile: ProfileRecord | None = None
    graph: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = field(default_factory=lambda: datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"))
    feeding: FeedingRecord | None = None

    @property
    def compile_seconds(self) -> float:
        """Time of capturing and compiling all programs, backward passes included."""
        forward = sum(sum(program.seconds.values()) for program in self.programs)
        return forward + self.counters.seconds.get(FIRST_BACKWARD, 0.0)

    def to_dict(self) -> dict:
        """Plain dicts, lists and numbers."""
        return asdict(self)

    def to_json(self) -> str:
        """Indented JSON; ``null`` for what is NaN or infinite."""
        return as_json(self.to_dict())

    def to_html(self) -> str:
        """One page that needs nothing else: styles and charts are inside, and no scripts."""
        from joestar.profile.html import render_html

        return render_html(self)

    def save(self, path: str | Path) -> None:
        """Writes a page (``.html``) or JSON (``.json``); beside first, then renamed: a reader finds all or nothing.

        Raises:
            ConfigError: for another suffix, or a path that cannot be written.
        """
        forms = {".html": self.to_html, ".json": self.to_json}
        form = forms.get(Path(path).suffix.lower())
        if form is None:
            raise ConfigError(f"{path}: a report is saved as .html or .json; got suffix {Path(path).suffix!r}.")
        write_text(path, form())

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """A report saved as JSON.

        Raises:
            ConfigError: if the file cannot be read, or holds something else.
        """
        try:
            content = json.loads(Path(path).read_text())
            return rebuilt(cls, {"date": "", **content} if isinstance(content, dict) else content)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: expected the JSON of a report, as Report.save writes it ({error}).") from error

    def __str__(self) -> str:
        from joestar.profile.view import render

        return render(self)
