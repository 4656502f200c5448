"""How near the tuner comes to an exhaustive sweep: every candidate of a space timed, and the tuner on the same space.

The space is that of a two-layer model, slack fixed, steps without Inductor (as the tuner screens them): small enough to
time every candidate. What the tuner believes to be a small space it tries in full, too (``tuner.FULL``). Candidates are
timed in rounds against the default, the better half again, and so on, exactly as the tuner's own are; its winner is
then timed once more against the best found.

    python benchmarks/sweep.py --models sage,gat --shape products
    python benchmarks/sweep.py --models sage --shape tiny --device cpu    # for this script's own sake
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.profile import tuner
from joestar.profile.tuner import Candidate, Space, Trials
from joestar.runtime.seeds import shuffled
from joestar.runtime.tuning import StepTimer, Variants, state_restored

LARGEST = 2000
"""Candidates of the largest space that is swept."""
MODELS = {
    "sage": lambda features, classes: joestar.nn.GraphSAGE(features, 128, 2, classes, dropout=0.5),
    "gcn": lambda features, classes: joestar.nn.GCN(features, 128, 2, classes, dropout=0.5),
    "gin": lambda features, classes: joestar.nn.GIN(features, 128, 2, classes, dropout=0.5),
    "gat": lambda features, classes: joestar.nn.GAT(features, 32, 2, classes, dropout=0.5, heads=4),
}


def ready(name: str, graph: joestar.Graph, batch: int, fanouts: list[int]):
    """(trainer, its variants, seeds of an epoch, sizes) of a model's step, traced."""
    torch.manual_seed(0)
    net = MODELS[name](graph.ndata["x"].shape[1], graph.num_classes).to(graph.device)
    sampler = joestar.NeighborSampler(graph, fanouts)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3), backend="eager")
    list(step.epoch(graph.train_idx[:batch], batch))
    trainer = step._runner
    order = shuffled(graph.train_idx, trainer.seed, 0)
    return trainer, Variants(trainer.executor.program), order, trainer.executor.profile(order, batch, trainer.seed, 0)


def sweep(name: str, graph: joestar.Graph, batch: int, fanouts: list[int]) -> dict:
    """Times every candidate, then lets the tuner search."""
    trainer, variants, order, profile = ready(name, graph, batch, fanouts)
    space = Space(variants.sites, {trainer.executor.slack: 0.0})
    everything = space.everything(LARGEST)
    if everything is None:
        raise SystemExit(f"{name}: more than {LARGEST} candidates")

    def timer() -> StepTimer:
        return StepTimer(trainer, variants, order, batch, profile, "eager")

    with state_restored(trainer):
        start = time.perf_counter()
        trials = Trials(space, timer(), time.perf_counter, float("inf"))
        trials.time_rounds(everything, 1)
        tuner.halve(trials, everything)
        best, times = trials.ranked()[0], {c: trials.milliseconds(c) for c in everything}
        trials.close()
        swept = time.perf_counter() - start
        outcome = tuner.tune(space, timer(), timer())
        found = outcome.winner
        searched = time.perf_counter() - start - swept
        ratio = against(timer(), found, best)
    default = times[space.default]
    return {
        "model": name, "candidates": len(everything), "sweep_seconds": swept, "tried": len(outcome.candidates),
        "tuner_seconds": searched, "default_ms": default, "best_ms": times[best], "best": dict(best.choices),
        "found": dict(found.choices), "found_over_best": ratio,
        "worst_ms": max(t for t in times.values() if t is not None),
    }  # fmt: skip


def against(timer: StepTimer, found: Candidate, best: Candidate, rounds: int = 9) -> float:
    """Median ratio of two candidates' steps, timed in turn."""
    if found == best:
        return 1.0
    ratios = [timer.milliseconds(found, r) / timer.milliseconds(best, r) for r in range(rounds + 1)][1:]
    for candidate in (found, best):
        timer.drop(candidate)
    return statistics.median(ratios)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="sage,gat", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--shape", default="products")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--fanouts", default="15,10")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = True
    graph = planted(options.shape, options.device)
    rows = []
    for name in options.models.split(","):
        row = sweep(name, graph, options.batch, [int(k) for k in options.fanouts.split(",")])
        rows.append(row)
        print(
            f"{name}: {row['candidates']} candidates swept in {row['sweep_seconds']:.0f} s: default "
            f"{row['default_ms']:.3f}, best {row['best_ms']:.3f}, worst {row['worst_ms']:.3f} ms; the tuner tried "
            f"{row['tried']} in {row['tuner_seconds']:.0f} s, and its choice takes {row['found_over_best']:.3f} of the "
            "time of the best",
            flush=True,
        )
    if options.out:
        beside = options.out.with_suffix(".part")
        beside.write_text(json.dumps(rows, indent=1))
        beside.replace(options.out)


if __name__ == "__main__":
    main()
