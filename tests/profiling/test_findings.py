"""What the report advises, from facts made by hand: each rule speaks where it should, and is silent elsewhere."""

from dataclasses import replace

import pytest

from joestar.profile import findings
from joestar.profile.findings import RULES, SHOWN, caveat
from joestar.profile.ledger import (
    BETWEEN,
    CandidateRecord,
    Counters,
    Environment,
    KernelRecord,
    ProfileRecord,
    ProgramRecord,
    Report,
    SetRecord,
    SiteRecord,
    StageRecord,
    TuningRecord,
)

LINE = "/home/me/model.py:45 in forward: h = self.lin(x)"
CPU = Environment("0.1.0", "2.13.0", "3.11.1", "cpu (x86_64)", 2, "AMD EPYC", 2, 8 << 30)
GPU = replace(CPU, device="cuda (NVIDIA H200)", threads=1, processors=16)


def sets(waste=0.04, low=1000, high=1050):
    return [SetRecord("hop 0 source nodes", 200, low, (low + high) / 2, high, int(high * (1 + waste)), waste)]


def program(**changes):
    seconds = {"capture": 0.5, "backend": 1.5}
    return replace(ProgramRecord("train", "", "", [], [], [], sets(), 1000, 1, {}, seconds, 0.01), **changes)


def profile(**changes):
    """A step of 10 ms in which all is well: 200 steps in an epoch, evenly spread over kernels."""
    phases = {"sampling": 1.0, "forward": 4.6, "backward": 3.7, "optimizer": 0.6, "bookkeeping": 0.1}
    kernels = [KernelRecord("aten::mm", "forward", 300.0, 1.0, "9x9 · 9x9", "convs.0", LINE)]
    kernels += [KernelRecord(f"joestar::op{i}", "forward", 290.0, 1.0) for i in range(30)]
    stages = [StageRecord("Joestar eager, no passes", 30.0, 1, 1), StageRecord("+ fusion", 20.0, 1, 1)]
    stages.append(StageRecord("+ Inductor", 10.0, 1, 1))
    return replace(ProfileRecord(10.0, 9.9, 10.1, 20, phases, kernels, stages, epoch_steps=200), **changes)


def report(environment=CPU, counters=None, tuning=None, settings=None, backend="inductor", programs=None, **changes):
    return Report(
        environment, "Net", "NeighborSampler", backend, "padded", programs or [program()],
        counters or Counters(steps=1000), tuning, profile(**changes), settings=settings or {},
    )  # fmt: skip


def kernels(*rows, rest=9000.0):
    made = [KernelRecord(name, "forward", micros, calls, "", "convs.0", LINE) for name, micros, calls in rows]
    return [*made, KernelRecord("joestar::spmm", "forward", rest, 1.0)]


SITE = SiteRecord("order:convs_0", ["update-first", "aggregate-first"], "update-first", "update-first", LINE)


def tuned(*times, choices=None):
    """Candidates with these compiled milliseconds, the first with defaults; the last one is taken."""
    rows = [
        CandidateRecord({} if i == 0 else {"order:convs_0": f"form-{i}"}, 0.01, None, ms, i == len(times) - 1)
        for i, ms in enumerate(times)
    ]
    return TuningRecord(rows, 12.0, False, "key")


SPEAKS = {
    "overflows": (
        report(counters=Counters(steps=1000, fallbacks=6, overflows=6)),
        ("0.6 %", "(6 of 1,000) exceeded their bounds", "slack=0.05"),
    ),
    "padding": (
        report(programs=[program(sets=sets(0.25), slack=0.2)]),
        ("25.0 %", "is padding", "slack=0.01"),
    ),
    "slower_stage": (
        report(stages=[*profile().stages[:2], StageRecord("+ Inductor", 24.0, 1, 1)], milliseconds=24.0),
        ("4.00 ms", "without “Inductor”", 'backend="eager"'),
    ),
    "slower_choice": (
        report(tuning=tuned(10.0, 6.0, 8.0)),
        ("25.0 %", "timed as slower (8.00 ms instead of 6.00 ms)", "choices={'order:convs_0': 'form-1'}"),
    ),
    "untimed_choices": (
        report(programs=[program(sites=[SITE, SITE])]),
        ("2 places", "have several correct forms (4 combinations)", "tune=True"),
    ),
    "measured_choices": (
        report(tuning=tuned(10.0, 8.0)),
        ("20.0 %", "saved by the choices", 'step.save_choices("choices.json")'),
    ),
    "memory_bound": (
        report(logical_bytes=6 * 10**9, copy_bandwidth=1e12),
        ("60.0 %", "only fewer bytes", "autocast=torch.bfloat16"),
    ),
    "compiling": (
        report(programs=[program(seconds={"backend": 500.0})], counters=Counters(10, seconds={"first backward": 20})),
        ("520 s", "saves 10.0 ms per step: it pays after 260 epochs", 'backend="eager"'),
    ),
    "recompiles": (report(counters=Counters(steps=9, recompiles=2)), ("2 times", "compiled again", "warm_up=100")),
    "host_bound": (
        report(kernels=kernels((BETWEEN, 3000.0, 1.0))),
        ("25.0 %", "between kernels", "batch_size=4000"),
    ),
    "small_batch": (
        report(phases={"forward": 6.0, "optimizer": 3.0, "bookkeeping": 1.0}),
        ("40.0 %", "does not depend on its 1,000 seeds", "batch_size=4000"),
    ),
    "threads": (report(replace(CPU, threads=1)), ("1 of 2", "processors are used", "OMP_NUM_THREADS=2")),
    "sampling_bound": (report(phases={"sampling": 5.0, "forward": 5.0}), ("50.0 %", "is sampling", "fanouts")),
    "copies": (
        report(kernels=kernels(("aten::copy_", 1000.0, 2.0))),
        ("10.0 %", "most of it for convs.0, at model.py:45", "the model"),
    ),
    "small_kernels": (
        report(kernels=kernels(("aten::add", 1000.0, 250.0), rest=4000.0), backend="eager"),
        ("250", "less than 5 µs each, 20.0 %", 'backend="inductor"'),
    ),
    "hottest": (
        report(),
        ("3.3 %", "aten::mm (9x9 · 9x9), for convs.0, at model.py:45", "autocast=torch.bfloat16"),
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert [rule.__name__ for rule in RULES] == list(SPEAKS)


@pytest.mark.parametrize("name", SPEAKS)
def test_a_rule_speaks_with_the_number_and_the_setting(name):
    facts, (number, words, setting) = SPEAKS[name]
    found = getattr(findings, name)(facts)
    assert (found.number, found.setting) == (number, setting)
    assert words in found.text
    assert found.text.endswith(".") and found.advice.endswith(".") and found.knob and 0 < found.gain < 2


@pytest.mark.parametrize("name", [name for name in SPEAKS if name != "hottest"])
def test_a_rule_is_silent_where_all_is_well(name):
    assert getattr(findings, name)(report()) is None


@pytest.mark.parametrize("name", SPEAKS)
def test_a_rule_stands_missing_measurements(name):
    bare = replace(report(), profile=None, programs=[], counters=Counters())
    assert getattr(findings, name)(bare) is None
    empty = replace(report(kernels=[], stages=[], phases={}, milliseconds=0.0, p20=0.0, p80=0.0), tuning=tuned())
    getattr(findings, name)(empty)


def test_small_batches_of_sizes_that_vary_should_grow():
    wide = [program(sets=sets(0.3, 200, 330), batch=70)]
    found = findings.padding(report(programs=wide))
    assert found.setting == "batch_size=280" and "Batches of 70 vary (hop 0 source nodes: 200 to 330)" in found.text
    assert findings.padding(report(programs=wide, epoch_steps=2)).setting == "batch_size=140"  # the whole epoch
    assert findings.padding(report(programs=wide, epoch_steps=1)) is None


def test_a_stage_in_between_may_be_slower():
    """On a GPU, Inductor launched kernel by kernel is often slower; what counts is the step in the end."""
    stages = [StageRecord(name, ms, 1, 1) for name, ms in (("a", 5.0), ("+ Inductor", 6.0), ("+ CUDA graph", 1.0))]
    assert findings.slower_stage(report(stages=stages, milliseconds=1.0)) is None


def test_differences_within_the_noise_are_none():
    stages = [StageRecord("a", 10.0, 1, 1), StageRecord("+ fusion", 11.0, 1, 1)]
    loud = {"stages": stages, "milliseconds": 11.0, "p20": 9.0, "p80": 13.0}
    assert findings.slower_stage(report(**loud)) is None
    assert findings.slower_stage(report(**{**loud, "p20": 10.9, "p80": 11.1})).setting == "tune=True"


def test_an_idle_gpu_wants_a_graph_or_more_to_do():
    phases = {"forward": 6.0, "idle": 4.0}
    found = findings.host_bound(report(GPU, phases=phases))
    assert (found.number, found.setting) == ("40.0 %", "cuda_graph=True")
    graphed = [*profile().stages, StageRecord("+ CUDA graph", 9.0, 1, 1)]
    assert findings.host_bound(report(GPU, phases=phases, stages=graphed)).setting == "batch_size=4000"
    assert findings.host_bound(report(GPU, phases=phases, stages=graphed, epoch_steps=1)) is None
    assert findings.threads(report(GPU)) is None


def test_what_is_in_bfloat16_already_is_not_advised_again():
    facts = {"logical_bytes": 6 * 10**9, "copy_bandwidth": 1e12}
    assert findings.memory_bound(report(settings={"autocast": "torch.bfloat16"}, **facts)).setting == "fanouts"


def test_the_most_promising_come_first_and_turn_different_knobs():
    facts = report(
        replace(CPU, threads=1), Counters(steps=1000, fallbacks=100), programs=[program(sites=[SITE], sets=sets(0.3))],
        phases={"forward": 7.0, "optimizer": 3.0},
    )  # fmt: skip
    found = findings.findings(facts)
    assert [one.setting for one in found] == ["slack=0.05", "OMP_NUM_THREADS=2", "batch_size=4000"]
    assert len({one.knob for one in found}) == SHOWN
    gains = [one.gain for one in found]
    assert gains == sorted(gains, reverse=True)


def test_there_are_three_where_all_is_well_and_none_without_measurements():
    found = findings.findings(report())
    assert len(found) == SHOWN
    assert [one.number for one in found[1:]] == ["0", "4.0 %"] and all(one.setting == "nothing" for one in found[1:])
    assert findings.findings(replace(report(), profile=None, programs=[], counters=Counters())) == []


def test_loud_measurements_are_called_so():
    assert caveat(report()) == ""
    assert "9.00 to 14.0 ms: something else was using this machine" in caveat(report(p20=9.0, p80=14.0))
