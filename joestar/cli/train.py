"""``joestar train``: the run itself."""

import dataclasses
import statistics
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import joestar
from joestar.cli import build
from joestar.cli.config import TrainConfig
from joestar.cli.files import check_writable, write_checkpoint, write_json
from joestar.cli.summary import short_report

LINES = 10
"""Lines of progress where the output is no terminal."""


def run(config: TrainConfig, console: Console) -> dict[str, Any]:
    """Trains, prints what comes of it, and writes the files that were asked for.

    Returns:
        ``settings``, ``results``, ``epochs`` and ``ledger``, as in the file of ``--report``.

    Raises:
        JoestarError: settings or data are unusable.
    """
    check_writable(config.report, "--report")
    check_writable(config.save, "--save")
    device = build.build_device(config)
    graph = joestar.load(config.dataset, root=config.root, split=config.split, seed=config.seed).to(device)
    build.check_graph(graph)
    console.print(f"{graph} on {device}")
    torch.manual_seed(config.seed)
    model = build.build_model(config, graph).to(device)
    optimizer = build.build_optimizer(config, model)
    step = joestar.compile(
        model,
        joestar.NeighborSampler(graph, config.fanouts, seed=config.seed),
        loss_fn=build.build_loss(config, graph, device),
        optimizer=optimizer,
        clip_grad_norm=config.clip_grad_norm,
        backend=config.backend,
        execution=config.execution,
        deterministic=config.deterministic,
    )
    saved = None if config.checkpoints is None else build.build_checkpoints(config, console)
    history = _fit(step, graph, config, build.build_scheduler(config, optimizer), saved, console)
    results = _results(history, step.evaluate(graph.test_idx, config.batch_size))
    report = step.report()
    _print_results(config, results, report, console)
    content = {
        "settings": dataclasses.asdict(config),
        "results": results,
        "epochs": [_record(record) for record in history.records],
        "ledger": report.to_dict(),
    }
    if config.report:
        write_json(config.report, content)
    if config.save:
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        write_checkpoint(config.save, {"model": state, "settings": content["settings"], "results": results})
    for path in filter(None, (config.report, config.save)):
        console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
    return content


def _fit(step, graph, config: TrainConfig, scheduler, saved: joestar.Checkpoints | None, console: Console):
    """``step.fit`` under a progress bar; lines instead of a bar where the output is no terminal."""
    words = TextColumn("{task.description}"), TextColumn("{task.fields[shown]}")
    columns = SpinnerColumn(), words[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words[1]
    first = "compiling" if config.backend == "inductor" else "warming up"
    if config.backend == "inductor" and config.execution == "padded":
        console.print("Compiling the training step: up to a minute or two on a small CPU; --backend eager skips it.")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=config.epochs, shown="")

        def on_epoch(record) -> None:
            shown = f"loss {record.loss:.4f}  val {record.val:.2%}  {record.seconds:.3f} s/epoch"
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
            checkpoints=saved,
            checkpoint_every=config.checkpoint_every,
            resume=config.resume,
        )


def _results(history, test: dict[str, float]) -> dict[str, Any]:
    """Best epoch (from 1), metrics in [0, 1], seconds of an epoch (median after the first, which compiles)."""
    metric = "f1_micro" if "f1_micro" in test else "accuracy"
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
    name = {"accuracy": "accuracy", "f1_micro": "micro F1"}[results["metric"]]
    table = Table(title=f"{config.model} on {config.dataset}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("best epoch", f"{results['best_epoch']} of {results['epochs']}")
    table.add_row(f"validation {name}", f"{results['validation']:.2%}")
    table.add_row(f"test {name} at that epoch", f"{results['test']:.2%}")
    table.add_row("time per epoch (median after the first)", f"{results['median_epoch_seconds']:.3f} s")
    table.add_row("first epoch, with compilation", f"{results['first_epoch_seconds']:.3f} s")
    console.print(table)
    for line in short_report(report):
        console.print(line, highlight=False)
    if not config.report:
        console.print("[dim]The whole ledger, with every curve: --report FILE.json[/]")


def _record(record) -> dict[str, float]:
    return {
        "epoch": record.epoch + 1,
        "loss": float(record.loss),
        "validation": float(record.val),
        "seconds": record.seconds,
    }
