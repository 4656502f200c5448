"""``joestar train``: the run itself."""

import copy
import dataclasses
import statistics
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import joestar
from joestar.cli import build, saved
from joestar.cli.config import TrainConfig
from joestar.cli.console import said_by_joestar, say, say_path
from joestar.cli.files import check_outputs, place_of, write_json
from joestar.cli.summary import short_report
from joestar.data.identity import identity_of
from joestar.distributed import is_first
from joestar.metrics import better

LINES = 10
"""Lines of progress where the output is no terminal."""
NAMES = {"f1_micro": "micro F1", "f1_macro": "macro F1", "roc_auc": "ROC AUC", "rmse": "RMSE", "mae": "MAE", "r2": "R2"}
"""Metrics as people call them."""
SHARES = ("accuracy", "f1", "f1_micro", "f1_macro")
"""Metrics that are read in per cent."""


def shown_score(metric: str, value: float) -> str:
    """``81.20%`` for shares, four digits for others."""
    return f"{value:.2%}" if metric in SHARES else f"{value:.4f}"


def _metric(record) -> str:
    """What decides, of the scores of an epoch."""
    return next(iter(getattr(record, "scores", None) or {}), "accuracy")


class Best:
    """The epochs so far, and the parameters of the best: what is left of a run that is stopped."""

    def __init__(self, model: torch.nn.Module, keep: bool, mode: str = "max"):
        self.model, self.keep, self.mode = model, keep, mode
        self.records: list = []
        self.state: dict[str, Any] | None = None
        self.record: Any = None

    def see(self, record) -> None:
        """Notes an epoch; copies the parameters if it is the best so far and they may be needed."""
        self.records.append(record)
        if self.record is None or better(record.val, self.record.val, self.mode):
            self.record = record
            if self.keep:
                self.state = copy.deepcopy(self.model.state_dict())

    def see_before(self, fit: Mapping[str, Any]) -> None:
        """Notes the epochs before a run went on, of its newest checkpoint; theirs may be the best."""
        old = [SimpleNamespace(**record) for record in fit["history"]["records"]]
        self.records = old + [record for record in self.records if record.epoch >= len(old)]
        first = next((record for record in old if record.epoch == fit["history"]["best_epoch"]), None)
        if first is not None and (self.record is None or not better(self.record.val, first.val, self.mode)):
            self.record, self.state = first, fit["best"]


def run(config: TrainConfig, console: Console) -> dict[str, Any]:
    """Trains, prints what comes of it, and writes the files that were asked for, also when it is stopped by a signal.

    Returns:
        ``settings``, ``results``, ``epochs`` and ``ledger``, as in the file of ``--report``.

    Raises:
        JoestarError: settings or data are unusable.
        KeyboardInterrupt: it was stopped (SIGTERM is a kind of it); the files hold what there was until then.
    """
    read = {"the dataset": place_of(config.dataset, config.root), "--partitions": config.partitions}
    check_outputs({"--report": config.report, "--save": config.save}, read, config.checkpoints)
    device = build.build_device(config)
    graph = joestar.load(config.dataset, root=config.root, split=config.split, seed=config.seed)
    config = build.build_backend(config, device, console)
    checkpoints, before = (None, None) if config.checkpoints is None else build.build_checkpoints(config, console)
    first_stage = build.build_first_stage(config, before)
    identity = identity_of(graph) if config.checkpoints or config.save else {}
    if checkpoints is not None:
        build.check_data(config, before, identity, console)
        checkpoints.extra["graph"] = identity
    if config.shard == "auto":
        plan = joestar.store.plan_graph(graph)
        for line in str(plan).splitlines():
            say(console, line)
        graph = plan.apply(graph, device=device)
    elif config.shard is not None:
        graph.ndata["x"] = joestar.store.shard(graph.ndata["x"], config.shard, device=device)
    graph = graph.to(device) if config.memory is None and first_stage is None else graph
    build.check_graph(graph)
    say(console, f"{graph} on {device}")
    autocast = build.autocast_of(graph)
    build.say_autocast(autocast, console)
    torch.manual_seed(config.seed)
    model = build.build_model(config, graph).to(device)
    optimizer = build.build_optimizer(config, model)
    with said_by_joestar(console):  # the plan, before anything is allocated
        step = joestar.compile(
            model,
            joestar.NeighborSampler(graph, config.fanouts, seed=config.seed),
            loss_fn=build.build_loss(config, graph, device),
            optimizer=optimizer,
            clip_grad_norm=config.clip_grad_norm,
            backend=config.backend,
            execution=config.execution,
            deterministic=config.deterministic,
            autocast=autocast,
            memory=config.memory,
            first_stage=first_stage,
            batch_size=config.batch_size,
        )
    mode = build.best_mode(config, graph)
    best = Best(model, config.save is not None, mode)
    try:
        history = _fit(step, graph, config, build.build_scheduler(config, optimizer, mode), checkpoints, best, console)
    except KeyboardInterrupt:
        _stopped(step, config, identity, checkpoints, best, console)
        raise
    results = _results(history, step.evaluate(graph.test_idx, config.batch_size, metric=config.metric))
    report = step.report()
    _print_results(config, results, report, console)
    content = _content(config, results, history.records, report)
    _write(config, content, step, identity, console)
    return content


def _stopped(step, config: TrainConfig, identity: dict, checkpoints, best: Best, console: Console) -> None:
    """After a signal: writes what was asked for, of the epochs so far, and says where it is."""
    if checkpoints is not None and config.resume:
        newest = checkpoints.latest() or {}
        if "fit" in newest:
            best.see_before(newest["fit"])
    done = len(best.records)
    say(console, f"Stopped after {done} of {config.epochs} epochs.")
    if config.checkpoints is not None:
        say_path(console, _kept(step, checkpoints, config.checkpoints))
    if done == 0:
        return
    results = {"interrupted": True, "best_epoch": best.record.epoch + 1, "epochs": best.records[-1].epoch + 1}
    results["validation"] = float(best.record.val)
    if best.state is not None:
        step.model.load_state_dict(best.state)
    score = shown_score(_metric(best.record), best.record.val)
    say(console, f"Best so far: epoch {results['best_epoch']}, validation {score}.")
    _write(config, _content(config, results, best.records, step.report()), step, identity, console)


def _kept(step, checkpoints, folder: str) -> str:
    """What there is to go on from."""
    paths = checkpoints.paths()
    if not paths:
        return f"There is no checkpoint in {folder} yet."
    on = "the same command with --resume goes on from it."
    if step.state_of_all:  # which ranks write together, and not when they are stopped
        return f"The newest whole state, {paths[-1].name}, is in {folder}: {on}"
    return f"The last state is in {folder}: {on}"


def _content(config: TrainConfig, results: dict[str, Any], records: list, report) -> dict[str, Any]:
    return {
        "settings": dataclasses.asdict(config),
        "results": results,
        "epochs": [_record(record) for record in records],
        "ledger": report.to_dict(),
    }


def _write(config: TrainConfig, content: dict[str, Any], step, identity: dict, console: Console) -> None:
    if not is_first():
        return
    if config.report:
        write_json(config.report, content)
    if config.save:
        saved.write(config.save, step.model, config, step.whole, content["results"], identity)
    for path in filter(None, (config.report, config.save)):
        say_path(console, f"Wrote {path}")
    if config.save and "test" in content["results"]:
        say_path(console, f"Use it: joestar evaluate {config.save}, joestar predict {config.save}")


def _fit(step, graph, config: TrainConfig, scheduler, checkpoints, best: Best, console: Console):
    """``step.fit`` under a progress bar; lines instead of a bar where the output is no terminal."""
    words = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    columns = SpinnerColumn(), words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    first = "compiling" if _compiles(config) else "warming up"
    if _compiles(config):
        say(console, "Compiling the training step: up to a minute or two on a small CPU; --backend eager skips it.")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=config.epochs, shown="")

        def on_epoch(record) -> None:
            best.see(record)
            score = shown_score(_metric(record), record.val)
            shown = f"loss {record.loss:.4f}  val {score}  {record.seconds:.3f} s/epoch"
            bar.update(task, advance=1, description="training", shown=shown)
            due = record.epoch == 0 or (record.epoch + 1) % max(1, config.epochs // LINES) == 0
            if not console.is_terminal and due:
                console.print(f"epoch {record.epoch + 1}/{config.epochs}  {shown}", highlight=False)

        return step.fit(
            graph.train_idx,
            graph.val_idx,
            epochs=config.epochs,
            batch_size=config.batch_size,
            patience=config.patience,
            scheduler=scheduler,
            on_epoch=on_epoch,
            checkpoints=checkpoints,
            checkpoint_every=config.checkpoint_every,
            resume=config.resume,
            metric=config.metric,
        )


def _compiles(config: TrainConfig) -> bool:
    return config.backend == "inductor" and config.execution == "padded"


def _results(history, test: dict[str, float]) -> dict[str, Any]:
    """Best epoch (from 1), metrics in [0, 1], seconds of an epoch (median after the first, which compiles)."""
    metric = next(iter(test))
    best = next(record for record in history.records if record.epoch == history.best_epoch)
    seconds = [record.seconds for record in history.records]
    return {
        "metric": metric,
        "best_epoch": history.best_epoch + 1,
        "epochs": len(history.records),
        "validation": float(best.val),
        "test": float(test[metric]),
        "first_epoch_seconds": seconds[0],
        "median_epoch_seconds": statistics.median(seconds[1:] or seconds),
    }


def _print_results(config: TrainConfig, results: dict[str, Any], report, console: Console) -> None:
    name = NAMES.get(results["metric"], results["metric"])
    table = Table(title=f"{config.model} on {config.dataset}", title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_row("best epoch", f"{results['best_epoch']} of {results['epochs']}")
    table.add_row(f"validation {name}", shown_score(results["metric"], results["validation"]))
    table.add_row(f"test {name} at that epoch", shown_score(results["metric"], results["test"]))
    table.add_row("time per epoch (median after the first)", f"{results['median_epoch_seconds']:.3f} s")
    how = "with compilation" if _compiles(config) else "with capture; nothing was compiled"
    table.add_row(f"first epoch, {how}", f"{results['first_epoch_seconds']:.3f} s")
    console.print(table)
    for line in short_report(report):
        say(console, line)
    if not config.report:
        console.print("[dim]The whole ledger, with every curve: --report FILE.json[/]")


def _record(record) -> dict[str, float]:
    return {
        "epoch": record.epoch + 1,
        "loss": float(record.loss),
        "validation": float(record.val),
        "seconds": record.seconds,
    }
