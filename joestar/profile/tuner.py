"""Search over the choices that a program leaves open, by timing whole steps (thesis 5.3.3).

The search knows neither programs nor devices: it is given the sites of a program under some choices, slacks of the
bounds, and two timers, one cheap (no compiler) and one true. Small spaces are tried in full, as in the thesis; of large
ones the single changes, combinations of those that helped, and the neighbourhoods of the best. Choices are searched
together: an order may open or close the sites of backward formats, and both directions of a step count.

Times drift and are noisy, so every round times the default before and after the others, a candidate's cost is the
median of its ratios to the default of the same round, and candidates drop out by successive halving: the leaders are
timed most often. The same timings give the same result.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from joestar.fusion.record import Site
from joestar.profile.ledger import CandidateRecord

FULL = 32
"""Spaces of at most so many candidates are tried in full."""
MOST = 64
"""Candidates that are tried of a larger space."""
ROUNDS = 3
FINALISTS = 4
"""Candidates that are left by halving, and then timed for as many more rounds."""
MARGIN = 0.01
"""Share by which a candidate must be faster than the default to replace it, in the median of all rounds..."""
MAJORITY = 0.75
"""...and share of the rounds in which it must be faster at all."""
SECONDS = 240.0
"""When nothing new is begun any more; what is under way then, one compilation at most, is finished."""
SCREENING = 0.4
"""Share of the time after which no new candidate is tried without the compiler."""


@dataclass(frozen=True)
class Candidate:
    """A combination of choices: those that are no default, ``(("kind:name", option), ...)`` sorted, and a slack."""

    choices: tuple[tuple[str, str], ...]
    slack: float


class Timer(Protocol):
    """Carries out steps of candidates."""

    def milliseconds(self, candidate: Candidate, round: int) -> float:
        """Time of a step now; infinite if the candidate cannot run. Candidates share the batch of a ``round``."""

    def drop(self, candidate: Candidate) -> None:
        """Frees what the candidate holds; it may come back."""


class Space:
    """The candidates of a program.

    Args:
        sites: the open sites of the program under some choices, in the order in which they are decided: a choice
            changes nothing but the sites behind its own.
        slacks: slack -> milliseconds per step that its overflows are expected to cost; the default first.
    """

    def __init__(self, sites: Callable[[Mapping[str, str]], Sequence[Site]], slacks: Mapping[float, float]):
        self._ask = sites
        self._known: dict[tuple, Sequence[Site]] = {}
        self.slacks = dict(slacks)
        self.default = Candidate((), next(iter(slacks)))

    def sites(self, choices: Mapping[str, str]) -> Sequence[Site]:
        """The sites of the program under these choices, asked once."""
        key = tuple(sorted(choices.items()))
        if key not in self._known:
            self._known[key] = tuple(self._ask(dict(choices)))
        return self._known[key]

    def canonical(self, wanted: Mapping[str, str], slack: float) -> Candidate:
        """The candidate nearest to some choices: those that belong to no site any more are left out."""
        taken, seen = {}, set()
        while site := next((site for site in self.sites(taken) if site.key not in seen), None):
            seen.add(site.key)
            option = wanted.get(site.key, site.default)
            if option in site.options and option != site.default:
                taken[site.key] = option
        return Candidate(tuple(sorted(taken.items())), slack)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Every candidate that differs in one choice."""
        choices, found = dict(candidate.choices), {}
        for site in self.sites(choices):
            for option in site.options:
                found[self.canonical({**choices, site.key: option}, candidate.slack)] = None
        found.update(dict.fromkeys(Candidate(candidate.choices, slack) for slack in self.slacks))
        found.pop(candidate, None)
        return list(found)

    def everything(self, limit: int) -> list[Candidate] | None:
        """All candidates, the default first; ``None`` if there are more than ``limit``."""
        sizes = [len(site.options) for site in self.sites({})]
        if math.prod(sizes) * len(self.slacks) > limit:
            return None
        found = {self.default: None}
        for candidate in (queue := [self.default]):
            new = [other for other in self.neighbours(candidate) if other not in found]
            found.update(dict.fromkeys(new))
            queue.extend(new)
            if len(found) > limit:
                return None
        return list(found)


@dataclass
class Trials:
    """Candidates timed against the default in interleaved rounds.

    Attributes:
        times: milliseconds of every run; ratios: per round, the cost of a candidate over that of the default.
        deadline: by ``clock``; behind it nothing new is begun.
    """

    space: Space
    timer: Timer
    clock: Callable[[], float]
    deadline: float
    times: dict[Candidate, list[float]] = field(default_factory=dict)
    ratios: dict[Candidate, list[float]] = field(default_factory=dict)
    rounds: int = 0

    def time_rounds(self, candidates: Iterable[Candidate], rounds: int = ROUNDS) -> None:
        """Times each of the candidates once a round, and the default before and after them."""
        others = [c for c in dict.fromkeys(candidates) if c != self.space.default]
        for turn in range(rounds):
            if self.times and self.past_deadline() and not turn:
                return
            before = self._time(self.space.default)
            shift = turn % max(len(others), 1)
            now = {c: self._time(c) for c in (*others[shift:], *others[:shift]) if self._runs(c)}
            base = (before + self._time(self.space.default)) / 2
            for candidate, milliseconds in now.items():
                self.ratios.setdefault(candidate, []).append(self._cost(candidate, milliseconds, base))
            self.rounds += 1
        self.ratios[self.space.default] = [1.0]

    def _runs(self, candidate: Candidate) -> bool:
        if candidate in self.times:
            return math.isfinite(self.times[candidate][-1])
        return not self.past_deadline()

    def _time(self, candidate: Candidate) -> float:
        milliseconds = self.timer.milliseconds(candidate, self.rounds)
        self.times.setdefault(candidate, []).append(milliseconds)
        return milliseconds

    def _cost(self, candidate: Candidate, milliseconds: float, base: float) -> float:
        extra = self.space.slacks
        return (milliseconds + extra[candidate.slack]) / (base + extra[self.space.default.slack])

    def past_deadline(self) -> bool:
        """Whether the time for new candidates is over."""
        return self.clock() > self.deadline

    def cost(self, candidate: Candidate) -> float:
        """Median cost of a step over that of the default; infinite if it was not timed."""
        return statistics.median(self.ratios.get(candidate, [math.inf]))

    def beats_default(self, candidate: Candidate) -> bool:
        """Whether it is faster by more than the noise."""
        ratios = self.ratios[candidate]
        wins = sum(ratio < 1 for ratio in ratios)
        return self.cost(candidate) <= 1 - MARGIN and wins >= MAJORITY * len(ratios)

    def ranked(self) -> list[Candidate]:
        """Everything that runs, best first; the default before what costs the same."""
        order = sorted(self.ratios, key=lambda c: (self.cost(c), c != self.space.default))
        return [candidate for candidate in order if math.isfinite(self.cost(candidate))]

    def keep(self, candidates: Iterable[Candidate]) -> None:
        """Frees all others, but the default."""
        kept = {*candidates, self.space.default}
        for candidate in self.times:
            if candidate not in kept:
                self.timer.drop(candidate)

    def close(self) -> None:
        """Frees everything."""
        for candidate in self.times:
            self.timer.drop(candidate)

    def milliseconds(self, candidate: Candidate) -> float | None:
        """Median time of a step; ``None`` if it was not timed or does not run."""
        times = self.times.get(candidate)
        return statistics.median(times) if times and math.isfinite(times[-1]) else None


def screen(trials: Trials) -> list[Candidate]:
    """Times the space, or what looks promising of it; the best first."""
    candidates = trials.space.everything(FULL)
    if candidates is None:
        candidates = _climb(trials)
    else:
        trials.time_rounds(candidates)
    halve(trials, candidates)
    return trials.ranked()


def _climb(trials: Trials) -> list[Candidate]:
    """Single changes, combinations of those that helped, then the neighbourhoods of the leaders until they stay."""
    space, explored = trials.space, {trials.space.default}
    trials.time_rounds(space.neighbours(space.default))
    trials.time_rounds(_combinations(trials))
    while not trials.past_deadline():
        leaders = trials.ranked()[:FINALISTS]
        trials.keep(leaders)
        centre = next((candidate for candidate in leaders if candidate not in explored), None)
        if centre is None:
            break
        explored.add(centre)
        new = [c for c in space.neighbours(centre) if c not in trials.times]
        trials.time_rounds([leaders[0], *new[: MOST - len(trials.times)]])
    return trials.ranked()[: 2 * FINALISTS]


def _combinations(trials: Trials) -> list[Candidate]:
    """The two, three, ... most helpful single changes together, one per site."""
    space, choices, slack, found = trials.space, {}, None, []
    for candidate in trials.ranked():
        if trials.cost(candidate) >= 1.0:
            break
        new = {key: option for key, option in candidate.choices if key not in choices}
        choices |= new
        if candidate.slack != space.default.slack and slack is None:
            slack = candidate.slack
        found.append(space.canonical(choices, space.default.slack if slack is None else slack))
    return [candidate for candidate in dict.fromkeys(found) if candidate not in trials.times]


def halve(trials: Trials, candidates: list[Candidate]) -> None:
    """The better half is timed again, until the finalists are left."""
    alive = list(candidates)
    while True:
        alive = sorted(alive, key=trials.cost)
        alive = alive[: max(FINALISTS, len(alive) // 2)]
        trials.keep(alive)
        trials.time_rounds(alive)
        if len(alive) <= FINALISTS:
            return


@dataclass
class Outcome:
    """What won, and everything that was tried."""

    winner: Candidate
    candidates: list[CandidateRecord]


def tune(
    space: Space, screening: Timer, final: Timer, seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:  # fmt: skip
    """The best candidate: the space is timed by ``screening``, the best two and the default again by ``final``.

    Args:
        screening: without compiler; final: as training will run. All that they hold is freed, but the winner in
            ``final``.
        seconds: by ``clock``, after which nothing new is begun.
    """
    start = clock()
    first = Trials(space, screening, clock, start + SCREENING * seconds)
    best = screen(first)[:2]
    first.close()
    last = Trials(space, final, clock, start + seconds)
    last.time_rounds(best, 2 * ROUNDS)
    winner = last.ranked()[0]
    if not last.beats_default(winner):
        winner = space.default
    for candidate in last.times:
        if candidate != winner:
            final.drop(candidate)
    records = [
        CandidateRecord(
            dict(c.choices), c.slack, first.milliseconds(c), last.milliseconds(c), taken=c == winner
        )
        for c in first.times
    ]  # fmt: skip
    return Outcome(winner, records)
