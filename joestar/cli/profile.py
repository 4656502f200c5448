"""``joestar profile``: a measured report."""

import shlex
from pathlib import Path

import torch
from rich.console import Console

import joestar
from joestar.bench.profile import profile
from joestar.cli import build
from joestar.cli.config import PROFILED, TrainConfig
from joestar.cli.console import say
from joestar.cli.files import check_outputs, check_writable, place_of
from joestar.errors import ConfigError
from joestar.profile.ledger import Report

SUFFIXES = {"--html": ".html", "--json": ".json"}


def run(
    config: TrainConfig, steps: int, ablation: bool, tune: bool, html: str | None, json_file: str | None,
    console: Console,
) -> Report:  # fmt: skip
    """Measures training steps, prints the tables, and writes the files that were asked for.

    Raises:
        JoestarError: settings or data are unusable, or a file cannot be written.
    """
    files = {"--html": html, "--json": json_file}
    for flag, path in files.items():
        _check_file(path, flag)
    check_outputs(files, {"the dataset": place_of(config.dataset, config.root)})
    device = build.build_device(config)
    graph = joestar.load(config.dataset, root=config.root, split=config.split, seed=config.seed).to(device)
    build.check_graph(graph)
    say(console, f"{graph} on {device}")
    autocast = build.autocast_of(graph)
    build.say_autocast(autocast, console)
    config = build.build_backend(config, device, console)
    if config.backend == "inductor":
        say(console, "Compiling the training step: up to a minute or two on a small CPU; --backend eager skips it.")
    torch.manual_seed(config.seed)
    model = build.build_model(config, graph).to(device)
    report = profile(
        model,
        joestar.NeighborSampler(graph, config.fanouts, seed=config.seed),
        build.build_loss(config, graph, device),
        build.build_optimizer(config, model),
        graph.train_idx,
        config.batch_size,
        steps=steps,
        ablation=ablation,
        say=lambda text: console.print(text, highlight=False, soft_wrap=True),
        clip_grad_norm=config.clip_grad_norm,
        backend=config.backend,
        deterministic=config.deterministic,
        autocast=autocast,
        tune=tune,
    )
    report.command = command(config, steps, ablation, tune)
    report.settings |= {name: _shown(value) for name, value in settings(config).items()}
    report.settings["autocast"] = "none" if autocast is None else build.named(autocast)
    console.print(str(report), highlight=False, markup=False, soft_wrap=True)
    for path in filter(None, files.values()):
        report.save(path)
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    if not html:
        console.print("[dim]As a page with charts: --html report.html[/]")
    return report


def settings(config: TrainConfig) -> dict[str, object]:
    """The settings of a step, by name."""
    return {name: getattr(config, name) for name in PROFILED}


def command(config: TrainConfig, steps: int, ablation: bool, tune: bool) -> str:
    """The command line that measures the same again: the dataset, and every setting that is no default."""
    plain = TrainConfig().resolved()
    words = ["joestar", "profile", config.dataset]
    for name, value in settings(config).items():
        flag = f"--{name.replace('_', '-')}"
        if name == "dataset" or value == getattr(plain, name):
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words.append(f"{flag}={_shown(value)}")
    words += [f"--steps={steps}", *([] if ablation else ["--no-ablation"]), *(["--tune"] if tune else [])]
    return shlex.join(words)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_file(path: str | None, flag: str) -> None:
    check_writable(path, flag)
    if path is not None and Path(path).suffix.lower() != SUFFIXES[flag]:
        raise ConfigError(f"{flag} {path}: expected a file name that ends in {SUFFIXES[flag]}.")
