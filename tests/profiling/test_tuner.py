"""The search over choices, with costs that are made up: nothing is timed here."""

import itertools
import math
import random

import pytest

from joestar.fusion import Site
from joestar.profile import tuner
from joestar.profile.sizes import SizeProfile, choose_bounds
from joestar.profile.slacks import RISK, overflow_risk, slack_options
from joestar.profile.tuner import Candidate, Space, tune


def site(key: str, *options: str) -> Site:
    kind, name = key.split(":")
    return Site(kind, name, options, options[0], options[0], "")


def flat(count: int, slacks=(0.03,), extra=0.0) -> Space:
    """``count`` independent sites of two options."""
    sites = [site(f"order:{i}", "left", "right") for i in range(count)]
    return Space(lambda choices: sites, dict.fromkeys(slacks, extra))


def opening(choices) -> list[Site]:
    """Updating first opens the backward pass of an aggregation that had none."""
    first = site("order:a", "aggregate-first", "update-first")
    if choices.get("order:a") != "update-first":
        return [first]
    return [first, site("backward:hop1", "scatter", "transposed", "linked")]


class FakeTimer:
    """Milliseconds by a cost model, with noise and drift; keeps track of what is held and how often it was timed."""

    def __init__(self, cost, noise: float = 0.0, drift: float = 0.0, seed: int = 0):
        self.cost = cost
        self.noise = noise
        self.drift = drift
        self.random = random.Random(seed)
        self.calls: list[Candidate] = []
        self.held: set[Candidate] = set()

    def milliseconds(self, candidate: Candidate, round: int) -> float:
        self.calls.append(candidate)
        self.held.add(candidate)
        drifted = 1 + self.drift * len(self.calls)
        return self.cost(candidate) * drifted * (1 + self.random.uniform(-self.noise, self.noise))

    def drop(self, candidate: Candidate) -> None:
        self.held.discard(candidate)


def model(seed: int, interaction: float = 0.08):
    """A step of 10 ms to which every choice gives a factor, every pair another one, and the slack padding."""
    rng = random.Random(seed)
    single, pairs = {}, {}

    def cost(candidate: Candidate) -> float:
        value = 10.0 * (1 + candidate.slack)
        for choice in candidate.choices:
            value *= 1 + single.setdefault(choice, rng.uniform(-0.25, 0.35))
        for pair in itertools.combinations(candidate.choices, 2):
            value *= 1 + pairs.setdefault(pair, rng.uniform(-interaction, interaction))
        return value

    return cost


def run(space: Space, cost, final=None, **options) -> tuner.Outcome:
    return tune(space, FakeTimer(cost), FakeTimer(final or cost), clock=lambda: 0.0, **options)


# --- the space ---


def test_everything_is_the_product():
    space = flat(3, slacks=(0.03, 0.0))
    found = space.everything(16)
    assert len(found) == len(set(found)) == 16 and found[0] == space.default == Candidate((), 0.03)
    assert space.everything(15) is None


def test_sites_that_open_with_a_choice():
    space = Space(opening, {0.03: 0.0})
    forms = [(), (("backward:hop1", "transposed"),), (("backward:hop1", "linked"),)]
    expected = {(), *(tuple(sorted((("order:a", "update-first"), *form))) for form in forms)}
    assert {candidate.choices for candidate in space.everything(32)} == expected


def test_choices_without_a_site_are_left_out():
    space = Space(opening, {0.03: 0.0})
    closed = space.canonical({"backward:hop1": "linked", "order:b": "left"}, 0.03)
    assert closed == space.default
    assert space.canonical({"order:a": "update-first", "backward:hop1": "scatter"}, 0.03).choices == (
        ("order:a", "update-first"),
    )


def test_the_program_is_asked_once_per_choices():
    asked = []
    space = Space(lambda choices: asked.append(tuple(choices.items())) or opening(choices), {0.03: 0.0, 0.0: 0.0})
    space.everything(32)
    assert len(asked) == len(set(asked))


# --- the search ---


def test_the_default_loses_where_something_is_faster():
    outcome = run(flat(2), lambda c: 7.0 if c.choices == (("order:1", "right"),) else 10.0)
    assert outcome.winner.choices == (("order:1", "right"),)
    (taken,) = [record for record in outcome.candidates if record.taken]
    assert (taken.choices, taken.eager_ms, taken.compiled_ms) == ({"order:1": "right"}, 7.0, 7.0)


def test_the_default_stays_within_the_margin():
    outcome = run(flat(2), lambda c: 10.0 if not c.choices else 9.95)
    assert outcome.winner == Candidate((), 0.03)
    assert [record.choices for record in outcome.candidates if record.taken] == [{}]


def test_the_default_stays_if_it_wins_too_often():
    """Faster by far in the median, but in two rounds of six slower: that is noise."""
    times = itertools.cycle([8.0, 8.0, 12.0])
    outcome = run(flat(1), lambda c: 10.0 - len(c.choices), lambda c: next(times) if c.choices else 10.0)
    assert outcome.winner == Candidate((), 0.03)


def test_a_pair_that_only_helps_together():
    outcome = run(Space(opening, {0.03: 0.0}), lambda c: {0: 10.0, 1: 11.0, 2: 6.0}[len(c.choices)])
    assert dict(outcome.winner.choices) in (
        {"order:a": "update-first", "backward:hop1": "transposed"},
        {"order:a": "update-first", "backward:hop1": "linked"},
    )


def test_compiled_times_decide():
    def final(candidate):
        return 12.0 if candidate.choices == (("order:0", "right"),) else 10.0 - len(candidate.choices)

    outcome = run(flat(2), lambda c: 5.0 if c.choices == (("order:0", "right"),) else 10.0 - len(c.choices), final)
    assert outcome.winner.choices == (("order:0", "right"), ("order:1", "right"))
    compiled = [record for record in outcome.candidates if record.compiled_ms is not None]
    assert len(compiled) == 3 and {} in [record.choices for record in compiled], "the best two and the default"


@pytest.mark.parametrize("sites", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seed", range(8))
def test_within_three_percent_of_the_exhaustive_sweep(sites, seed):
    space, cost = flat(sites, slacks=(0.03, 0.01)), model(seed)
    timers = [FakeTimer(cost, noise=0.02, drift=1e-3, seed=seed + i) for i in range(2)]
    outcome = tune(space, *timers, clock=lambda: 0.0)
    best = min(map(cost, space.everything(10**6)))
    assert cost(outcome.winner) <= 1.03 * best
    assert len(outcome.candidates) >= min(8, 2 ** (sites + 1))
    if 2 ** (sites + 1) > tuner.FULL:
        assert len(outcome.candidates) <= tuner.MOST < 2**8


def test_drift_does_not_favour_what_comes_first():
    """The step gets 3 % slower with every run: a candidate that is 5 % faster still wins."""
    outcome = tune(
        flat(3), FakeTimer(fast := lambda c: 9.5 if c.choices == (("order:2", "right"),) else 10.0, drift=0.03),
        FakeTimer(fast, drift=0.03), clock=lambda: 0.0,
    )  # fmt: skip
    assert outcome.winner.choices == (("order:2", "right"),)


def test_leaders_are_timed_most():
    space, timer = flat(5), FakeTimer(model(1))
    tune(space, timer, FakeTimer(model(1)), clock=lambda: 0.0)
    others = [c for c in set(timer.calls) if c != space.default]
    counts = {c: timer.calls.count(c) for c in others}
    best, worst = min(others, key=timer.cost), max(others, key=timer.cost)
    assert counts[worst] == tuner.ROUNDS and counts[best] >= 4 * tuner.ROUNDS


def test_the_same_timings_give_the_same_result():
    first, second = (
        tune(flat(6), FakeTimer(model(3), 0.05), FakeTimer(model(3), 0.05), clock=lambda: 0.0) for _ in range(2)
    )
    assert first == second


def test_what_cannot_run_never_wins():
    outcome = run(flat(2), lambda c: math.inf if ("order:0", "right") in c.choices else 10.0 - len(c.choices))
    assert outcome.winner.choices == (("order:1", "right"),)
    failed = [record for record in outcome.candidates if "order:0" in record.choices]
    assert len(failed) == 2 and all(record.eager_ms is None for record in failed)


@pytest.mark.parametrize("sites", [2, 6])
def test_only_the_winner_is_left(sites):
    screening, final = FakeTimer(model(5)), FakeTimer(model(5))
    outcome = tune(flat(sites), screening, final, clock=lambda: 0.0)
    assert screening.held == set() and final.held == {outcome.winner}


def test_few_candidates_are_held_at_a_time_in_a_large_space():
    timer = FakeTimer(model(2))
    held = []
    timer.milliseconds = lambda c, r, inner=timer.milliseconds: (inner(c, r), held.append(len(timer.held)))[0]
    tune(flat(10), timer, FakeTimer(model(2)), clock=lambda: 0.0)
    assert max(held) <= 2 * 10 + tuner.FINALISTS


@pytest.mark.parametrize("sites", [4, 8])
def test_nothing_new_is_begun_after_the_deadline(sites):
    now = itertools.count()  # a second passes with every look at the clock
    timer = FakeTimer(model(0))
    outcome = tune(flat(sites), timer, FakeTimer(model(0)), seconds=20, clock=lambda: next(now))
    assert 1 < len(set(timer.calls)) <= 10
    assert outcome.winner in timer.calls
    late = tune(flat(sites), timer := FakeTimer(model(0)), FakeTimer(model(0)), seconds=-1, clock=lambda: 0.0)
    assert set(timer.calls) == {Candidate((), 0.03)} and late.winner == Candidate((), 0.03)


# --- slack ---


def test_expected_overflows_count_as_time():
    slacks = {0.1: 0.0, 0.0: 3.0}
    sites = [site("order:a", "left", "right")]

    def cost(candidate):
        return 10.0 * (1 + candidate.slack)

    assert run(Space(lambda c: sites, slacks), cost).winner.slack == 0.1
    assert run(Space(lambda c: sites, {0.1: 0.0, 0.0: 0.1}), cost).winner.slack == 0.0


def profile(spread: float, batches: int = 12, seed: int = 0) -> SizeProfile:
    rng = random.Random(seed)
    return SizeProfile(
        ["sample", "compact"], [[10_000, round(rng.gauss(20_000, spread * 20_000))] for _ in range(batches)]
    )


def test_smaller_slacks_where_sizes_hardly_vary():
    options = slack_options(profile(0.0005), 1000, 10**6, 0.03)
    assert list(options) == [0.03, 0.0, 0.01] and all(risk <= RISK for risk in options.values())


def test_a_risky_slack_gets_the_first_safe_one_beside_it():
    options = slack_options(profile(0.15), 1000, 10**6, 0.0)
    first, *others = options
    assert first == 0.0 and options[0.0] > RISK
    assert len(others) == 1 and options[others[0]] <= RISK and others[0] > 0


def test_slacks_with_the_same_bounds_are_one():
    small = SizeProfile(["sample"], [[40], [44], [48]])
    assert list(slack_options(small, 8, 100, 0.01)) == [0.01]


def test_sizes_without_variation_never_overflow():
    assert overflow_risk(SizeProfile(["sample"], [[100], [100]]), [100], 10) == 0.0
    assert overflow_risk(SizeProfile(["sample"], [[100]]), [100], 10) == 0.0
    full = SizeProfile(["compact"], [[90], [100], [80]])
    assert overflow_risk(full, [112], 105) == 0.0 < overflow_risk(full, [112], 10**6)


def test_the_risk_is_how_often_the_next_batch_is_larger():
    """Bounds two standard deviations above the mean of 8 batches, many times."""
    rng, predicted, happened, trials = random.Random(1), 0.0, 0, 4000
    for _ in range(trials):
        sizes = [[rng.gauss(1000, 50)] for _ in range(8)]
        mean = sum(s for (s,) in sizes) / 8
        spread = math.sqrt(sum((s - mean) ** 2 for (s,) in sizes) / 7)
        bound = mean + 2 * spread
        predicted += overflow_risk(SizeProfile(["sample"], sizes), [bound], 10**6)
        happened += rng.gauss(1000, 50) > bound
    assert happened / trials == pytest.approx(predicted / trials, rel=0.15)


def test_the_users_slack_comes_first_with_its_bounds():
    sizes = profile(0.01)
    options = slack_options(sizes, 1000, 10**6, 0.2)
    assert next(iter(options)) == 0.2
    assert choose_bounds(sizes, 1000, 10**6, 0.2) == max(choose_bounds(sizes, 1000, 10**6, s) for s in options)
