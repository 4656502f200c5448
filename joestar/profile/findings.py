"""What to do next: sentences made from the measurements by rules, the most promising first.

A rule looks at the report and says nothing, or one finding: a number, what it means, and the setting to change. They
are ranked by ``gain``, an estimate of the share of a step that the change may save; it is never shown, since only
measuring tells.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from joestar.profile import numbers
from joestar.profile.ledger import BETWEEN, KernelRecord, ProfileRecord, Report, SetRecord
from joestar.profile.phases import BOOKKEEPING, IDLE
from joestar.profile.places import short_line

SHOWN = 3
REDONE = 0.002
"""Share of batches that may overflow without a word."""
WASTE, FLOOR, HOST, FIXED, SAMPLING, COPIES, SMALL = 0.10, 0.40, 0.20, 0.15, 0.35, 0.05, 0.10
"""Shares from which padding, memory, the host, fixed costs, sampling, copies and small kernels are worth a sentence."""
NOISE = 0.03
"""Difference between stages that says nothing."""
SHORT_RUN = 100
"""Epochs of a short run, which compiling should pay for."""
TINY = 5.0
"""Microseconds below which a kernel is small."""
MOVES = ("copy_", "clone", "aten::cat", "contiguous", "fill_", "zero_", "Memcpy", "Memset")
PRODUCTS = ("::mm", "addmm", "bmm", "gemm", "cutlass")


@dataclass(frozen=True)
class Finding:
    """One sentence of advice.

    Attributes:
        number: what was measured, with its unit; text: what it means; setting: what to change, as code where it is one;
        advice: the rest of that sentence; knob: what the setting turns, so that no two findings turn the same.
        gain: for ranking, see above.
    """

    number: str
    text: str
    setting: str
    advice: str
    knob: str
    gain: float


def findings(report: Report) -> list[Finding]:
    """The ``SHOWN`` most promising ones, one per knob; what is in order fills up the list if there are fewer."""
    ranked = sorted((found for rule in RULES if (found := rule(report)) is not None), key=lambda f: -f.gain)
    chosen: list[Finding] = []
    for finding in ranked:
        if finding.knob not in {other.knob for other in chosen}:
            chosen.append(finding)
    fine = [finding for finding in _fine(report) if finding.knob not in {other.knob for other in chosen}]
    return [*chosen, *fine][:SHOWN]


# --- what is known of a step ---


def _share(profile: ProfileRecord, *names: str) -> float:
    """Share of these phases in a step."""
    total = sum(profile.phases.values())
    return sum(profile.phases.get(name, 0.0) for name in names) / total if total else 0.0


def _bounded(report: Report) -> list[SetRecord]:
    return [row for program in report.programs[:1] for row in program.sets if row.waste is not None]


def _on_gpu(report: Report) -> bool:
    return report.environment.device.startswith("cuda")


def _kernel_time(profile: ProfileRecord) -> float:
    return sum(kernel.microseconds for kernel in profile.kernels)


def _working(profile: ProfileRecord) -> list[KernelRecord]:
    return [kernel for kernel in profile.kernels if kernel.name != BETWEEN]


def _may_grow(report: Report) -> bool:
    """Whether a larger batch is possible: an epoch has several steps."""
    return report.profile is None or report.profile.epoch_steps is None or report.profile.epoch_steps > 1


def _larger(report: Report, times: int) -> int:
    """A larger batch: so many times as large, or the whole epoch."""
    batch, profile = report.programs[0].batch, report.profile
    most = batch * times if profile is None or profile.epoch_steps is None else batch * profile.epoch_steps
    return min(batch * times, most)


# --- rules ---


def overflows(report: Report) -> Finding | None:
    """Batches that exceeded their bounds were carried out twice."""
    counters = report.counters
    share = counters.fallbacks / counters.steps if counters.steps else 0.0
    if share <= REDONE:
        return None
    slack = next((program.slack for program in report.programs if program.slack is not None), 0.01)
    return Finding(
        numbers.percent(share),
        f"of the batches ({counters.fallbacks:,} of {counters.steps:,}) exceeded their bounds and were carried out "
        "again, exactly.",
        f"slack={max(0.05, round(4 * slack, 3)):g}", "in joestar.compile gives them more room.", "bounds", 3 * share,
    )  # fmt: skip


def padding(report: Report) -> Finding | None:
    """Bounds are far above the sizes: a lower slack, or larger batches, whose sizes vary less."""
    sets = _bounded(report)
    waste = sum(row.waste for row in sets) / len(sets) if sets else 0.0
    if waste < WASTE:
        return None
    work = 1.0 if report.profile is None else _share(report.profile, "sampling", "forward", "backward")
    slack, batch = report.programs[0].slack or 0.0, report.programs[0].batch
    text = "of the compiled sizes is padding, on average: work on rows that are thrown away."
    if slack >= waste / 3:
        return Finding(
            numbers.percent(waste), text, "slack=0.01", f"(now {slack:g}) brings the bounds down.", "bounds",
            waste * work,
        )  # fmt: skip
    if not _may_grow(report):
        return None
    row = max(sets, key=lambda row: row.waste)
    seen = f"Batches of {batch:,} vary ({row.name}: {row.minimum:,} to {row.maximum:,}); "
    return Finding(
        numbers.percent(waste), f"{text} {seen}larger ones vary less.", f"batch_size={_larger(report, 4)}",
        "shrinks it.", "batch_size", waste * work / 2,
    )  # fmt: skip


STAGE_ADVICE = {
    "+ fusion": ("tune=True", "(--tune) times the choices that were made by estimate.", "choices"),
    "+ Inductor": ('backend="eager"', "leaves it out.", "backend"),
    "+ CUDA graph": ("cuda_graph=False", "leaves it out.", "cuda_graph"),
    "+ measured choices": ("tune=False", "keeps the defaults.", "choices"),
}


def slower_stage(report: Report) -> Finding | None:
    """The step is slower than an earlier stage: what came in since costs more than it brings."""
    stages = [] if report.profile is None else report.profile.stages
    if len(stages) < 2:
        return None
    best = min(range(len(stages)), key=lambda index: stages[index].milliseconds)
    lost = stages[-1].milliseconds - stages[best].milliseconds
    since = list(itertools.pairwise(stages[best:]))
    if not since or lost <= _noise(report.profile) * stages[best].milliseconds:
        return None
    _, stage = max(since, key=lambda pair: pair[1].milliseconds - pair[0].milliseconds)
    if stage.stage not in STAGE_ADVICE:
        return None
    return Finding(
        numbers.milliseconds(lost), f"per step is what it takes more than without “{stage.stage.removeprefix('+ ')}”.",
        *STAGE_ADVICE[stage.stage], lost / report.profile.milliseconds,
    )  # fmt: skip


def _noise(profile: ProfileRecord) -> float:
    return max(NOISE, (profile.p80 - profile.p20) / profile.milliseconds / 2 if profile.milliseconds else 0.0)


def slower_choice(report: Report) -> Finding | None:
    """A form was taken that the tuner has timed as slower than another."""
    timed = [c for c in report.tuning.candidates if c.compiled_ms] if report.tuning else []
    taken = next((candidate for candidate in timed if candidate.taken), None)
    if taken is None:
        return None
    best = min(timed, key=lambda candidate: candidate.compiled_ms)
    lost = 1 - best.compiled_ms / taken.compiled_ms
    if lost < NOISE:
        return None
    return Finding(
        numbers.percent(lost),
        f"of a step is lost by choices that were timed as slower ({numbers.milliseconds(taken.compiled_ms)} instead of "
        f"{numbers.milliseconds(best.compiled_ms)}).",
        f"choices={best.choices!r}" if best.choices else "choices=None", "takes the faster ones.", "choices", lost,
    )  # fmt: skip


def untimed_choices(report: Report) -> Finding | None:
    """Several forms are correct, and nobody has timed them."""
    sites = [site for program in report.programs[:1] for site in program.sites if len(site.options) > 1]
    if report.tuning is not None or not sites or any(site.taken != site.default for site in sites):
        return None
    options = math.prod(len(site.options) for site in sites)
    return Finding(
        numbers.plural(len(sites), "place"),
        f"of the program {'has' if len(sites) == 1 else 'have'} several correct forms ({options:,} combinations), "
        f"taken by estimate, not by timing; the first is {sites[0].key}.",
        "tune=True", "(--tune) times them and keeps the result for the next run.", "choices", 0.03,
    )  # fmt: skip


def measured_choices(report: Report) -> Finding | None:
    """The tuner found something better than the defaults: keep it."""
    timed = [c for c in report.tuning.candidates if c.compiled_ms] if report.tuning else []
    taken = next((candidate for candidate in timed if candidate.taken and candidate.choices), None)
    default = next((candidate for candidate in timed if not candidate.choices), None)
    if taken is None or default is None or taken.compiled_ms >= default.compiled_ms:
        return None
    return Finding(
        numbers.percent(1 - taken.compiled_ms / default.compiled_ms),
        "of a step is saved by the choices that the tuner has timed.", 'step.save_choices("choices.json")',
        'and joestar.compile(choices="choices.json") keep them without timing again.', "choices", 0.02,
    )  # fmt: skip


def memory_bound(report: Report) -> Finding | None:
    """The step is near what memory allows: only fewer bytes make it faster."""
    profile = report.profile
    if profile is None or profile.floor_milliseconds is None or not profile.milliseconds:
        return None
    share = profile.floor_milliseconds / profile.milliseconds
    if share < FLOOR:
        return None
    if report.settings.get("autocast", "None") == "None":
        setting, advice, knob = "autocast=torch.bfloat16", "and features in bfloat16 halve them.", "precision"
    else:
        setting, advice, knob = "fanouts", "that are smaller gather fewer rows.", "fanouts"
    text = f"of a step is the time that its {numbers.human_bytes(profile.logical_bytes)} take at the speed of memory: "
    return Finding(numbers.percent(share), text + "only fewer bytes make it faster.", setting, advice, knob, share / 2)


def compiling(report: Report) -> Finding | None:
    """Compiling pays after so many steps, which a short run may not have."""
    seconds, profile = report.compile_seconds, report.profile
    if profile is None or report.backend != "inductor" or not seconds or not profile.epoch_seconds:
        return None
    eager = next((stage for stage in profile.stages if stage.stage == "+ fusion"), None)
    saved = 0.0 if eager is None else eager.milliseconds - profile.milliseconds
    if saved <= 0:
        return None
    epochs = seconds / (saved / 1e3) / profile.epoch_steps
    if epochs <= SHORT_RUN:
        return None
    return Finding(
        numbers.seconds(seconds),
        f"went into compiling, which saves {numbers.milliseconds(saved)} per step: it pays after "
        f"{numbers.rounded(epochs)} epochs.",
        'backend="eager"', "is faster for runs shorter than that.", "backend",
        0.5 * seconds / (seconds + SHORT_RUN * profile.epoch_seconds),
    )  # fmt: skip


def recompiles(report: Report) -> Finding | None:
    """The program was compiled again, since batches outgrew it."""
    times = report.counters.recompiles
    if not times:
        return None
    return Finding(
        numbers.plural(times, "time"), "the program was compiled again, because batches outgrew its bounds.",
        "warm_up=100", "chooses the bounds from more batches; the largest batch size should come first.", "bounds",
        0.05 * times,
    )  # fmt: skip


def host_bound(report: Report) -> Finding | None:
    """The device waits for the host, or the host is busy with anything but kernels."""
    profile = report.profile
    if profile is None:
        return None
    if _on_gpu(report):
        share, what = _share(profile, IDLE), "of a step the GPU runs no kernel: it waits for the host."
        graphed = any(stage.stage == "+ CUDA graph" for stage in profile.stages)
        setting, advice, knob = "cuda_graph=True", "launches all of it at once.", "cuda_graph"
        if graphed and _may_grow(report):
            setting, advice, knob = f"batch_size={_larger(report, 4)}", "gives it more to do at a time.", "batch_size"
        elif graphed:
            return None
    else:
        between = sum(kernel.microseconds for kernel in profile.kernels if kernel.name == BETWEEN)
        share = between / _kernel_time(profile) if profile.kernels else 0.0
        what = "of a traced step is spent between kernels: Python, autograd and launches, whatever the batch."
        setting, advice, knob = f"batch_size={_larger(report, 4)}", "spreads that over more seeds.", "batch_size"
        if not _may_grow(report):
            return None
    if share < HOST:
        return None
    return Finding(numbers.percent(share), what, setting, advice, knob, share * 0.6)


def small_batch(report: Report) -> Finding | None:
    """What does not depend on the batch takes much of a step."""
    profile = report.profile
    if profile is None or not report.programs or not _may_grow(report):
        return None
    share = _share(profile, "optimizer", BOOKKEEPING)
    if share < FIXED:
        return None
    return Finding(
        numbers.percent(share),
        f"of a step (optimizer, bookkeeping) does not depend on its {report.programs[0].batch:,} seeds.",
        f"batch_size={_larger(report, 4)}", "spreads it over more of them.", "batch_size", share * 0.6,
    )  # fmt: skip


def threads(report: Report) -> Finding | None:
    """Processors are left unused."""
    env = report.environment
    if _on_gpu(report) or not 0 < env.threads < env.processors:
        return None
    return Finding(
        f"{env.threads} of {env.processors}", "processors are used by this process.",
        f"OMP_NUM_THREADS={env.processors}", "(or torch.set_num_threads) uses all of them.", "threads",
        0.5 * (1 - env.threads / env.processors),
    )  # fmt: skip


def sampling_bound(report: Report) -> Finding | None:
    """Sampling takes much of a step."""
    share = 0.0 if report.profile is None else _share(report.profile, "sampling")
    if share < SAMPLING:
        return None
    return Finding(
        numbers.percent(share), "of a step is sampling.", "fanouts", "that are smaller draw fewer neighbours.",
        "fanouts", share * 0.4,
    )  # fmt: skip


def copies(report: Report) -> Finding | None:
    """Copies, fills and concatenations take much of the kernels' time."""
    profile = report.profile
    moves = [] if profile is None else [k for k in _working(profile) if any(part in k.name for part in MOVES)]
    share = sum(kernel.microseconds for kernel in moves) / _kernel_time(profile) if moves else 0.0
    if share < COPIES:
        return None
    most = max(moves, key=lambda kernel: kernel.microseconds)
    return Finding(
        numbers.percent(share), f"of the kernels' time goes into copies, fills and joins, most of it {_for(most)}.",
        "the model", "may do without clone, contiguous or cat there.", "model", share * 0.5,
    )  # fmt: skip


def small_kernels(report: Report) -> Finding | None:
    """Many kernels do next to nothing: a compiler merges them."""
    profile = report.profile
    if profile is None or report.backend != "eager":
        return None
    small = [k for k in _working(profile) if k.calls and k.microseconds / k.calls < TINY]
    share = sum(kernel.microseconds for kernel in small) / _kernel_time(profile) if small else 0.0
    if share < SMALL:
        return None
    calls = sum(kernel.calls for kernel in small)
    return Finding(
        numbers.count(round(calls)), f"kernels of a step take less than {TINY:g} µs each, {numbers.percent(share)} of "
        "the time together: they mostly wait for each other.", 'backend="inductor"', "merges them.", "backend", share,
    )  # fmt: skip


def hottest(report: Report) -> Finding | None:
    """The kernel that takes longest, and what it depends on."""
    working = [] if report.profile is None else _working(report.profile)
    if not working:
        return None
    most = working[0]
    share = most.microseconds / _kernel_time(report.profile)
    if any(part in most.name for part in PRODUCTS):
        fast = "torch.backends.cuda.matmul.allow_tf32 = True" if _on_gpu(report) else "autocast=torch.bfloat16"
        setting, advice, knob = fast, "makes products cheaper; so do fewer hidden channels.", "precision"
    else:
        setting, advice, knob = "fanouts", "that are smaller, or fewer hidden channels, give it less to do.", "fanouts"
    shape = f" ({most.shape})" if most.shape else ""
    return Finding(
        numbers.percent(share), f"of the kernels' time is one of them: {most.name}{shape}, {_for(most)}.", setting,
        advice, knob, share * 0.1,
    )  # fmt: skip


def _for(kernel: KernelRecord) -> str:
    line = short_line(kernel.source)
    where = [f"for {kernel.layer}"] if kernel.layer else []
    return ", ".join(where + ([f"at {line}"] if line else [])) or f"in the {kernel.phase}"


RULES: tuple[Callable[[Report], Finding | None], ...] = (
    overflows, padding, slower_stage, slower_choice, untimed_choices, measured_choices, memory_bound, compiling,
    recompiles, host_bound, small_batch, threads, sampling_bound, copies, small_kernels, hottest,
)  # fmt: skip


def _fine(report: Report) -> list[Finding]:
    """What is in order, for reports with little to say."""
    found, sets, counters = [], _bounded(report), report.counters
    nothing = Finding("", "", "nothing", "to change there.", "", 0.0)
    if counters.steps and not counters.fallbacks:
        found.append(
            replace(
                nothing, number="0", text=f"of {numbers.plural(counters.steps, 'batch', 'batches')} exceeded their "
                "bounds.", knob="bounds",
            )
        )  # fmt: skip
    if sets:
        waste = numbers.percent(sum(row.waste for row in sets) / len(sets))
        found.append(replace(nothing, number=waste, text="of the compiled sizes is padding.", knob="batch_size"))
    if counters.replay_rate is not None:
        rate = numbers.percent(counters.replay_rate)
        found.append(replace(nothing, number=rate, text="of the steps ran as one static program.", knob="execution"))
    return found


def caveat(report: Report) -> str:
    """Why the numbers should be taken with care, if they should."""
    profile = report.profile
    if profile is None or not profile.p20 or profile.p80 < 1.5 * profile.p20:
        return ""
    return (
        f"Steps took {numbers.digits(profile.p20)} to {numbers.milliseconds(profile.p80)}: something else was using "
        "this machine. Repeat it with more steps (--steps 100) before you trust a difference."
    )
