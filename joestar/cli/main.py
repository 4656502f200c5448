"""The ``joestar`` command."""

import json
from pathlib import Path
from typing import Annotated

import typer

from joestar.cli.config import PROFILED, TrainConfig
from joestar.cli.console import out, plain_errors
from joestar.cli.flags import takes_settings

app = typer.Typer(
    name="joestar",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Joestar trains graph neural networks on sampled neighbourhoods, with the whole training step compiled into "
    "one program.\n\n[bold]First steps:[/]\n\n"
    "[cyan]joestar doctor[/]  is everything there?\n\n"
    "[cyan]joestar train[/]   trains GraphSAGE on the bundled Cora graph\n\n"
    "[cyan]joestar info ogbn-products --root data[/]  what is in a dataset?\n\n"
    "[cyan]joestar profile --html report.html[/]  where does the time of a step go?",
)


def train(config: TrainConfig) -> None:
    """Train a model on a dataset, and report the test accuracy at the best validation epoch.

    [bold]Examples:[/]

    [cyan]joestar train[/]  GraphSAGE on the bundled Cora graph, about a minute

    [cyan]joestar train cora --model gat --hidden 64 --heads 8 --epochs 100 --patience 20[/]

    [cyan]joestar train ogbn-products --root data --fanouts 15,10,5 --hidden 256 --lr 0.003 --save best.pt[/]

    [cyan]joestar train my-graph.npz --config run.toml --report result.json[/]  settings from a file
    """
    from joestar.cli.train import run

    run(config, out())


app.command("train")(plain_errors(takes_settings(train)))


def profile(
    config: TrainConfig,
    steps: Annotated[int, typer.Option(help="Timed steps of every stage.", min=1, rich_help_panel="Execution")] = 20,
    ablation: Annotated[
        bool, typer.Option(help="Also time the stages before the last.", rich_help_panel="Execution")
    ] = True,
    tune: Annotated[
        bool, typer.Option("--tune", help="Add a stage that makes its choices by timing.", rich_help_panel="Execution")
    ] = False,
    html: Annotated[
        str | None, typer.Option("--html", help="Write the report as one HTML page.", rich_help_panel="Output")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the report as JSON.", rich_help_panel="Output")
    ] = None,
) -> None:
    """Show where the time of a training step goes, what fusing and compiling bring, and how full the bounds are.

    Nothing is saved but the report: the model trains on copies.

    [bold]Examples:[/]

    [cyan]joestar profile --html report.html[/]  GraphSAGE on the bundled Cora graph, about a minute

    [cyan]joestar profile ogbn-products --root data --fanouts 15,10,5 --html report.html --json report.json[/]
    """
    from joestar.cli.profile import run

    run(config, steps, ablation, tune, html, json_file, out())


app.command("profile")(plain_errors(takes_settings(profile, PROFILED)))


@app.command("info")
@plain_errors
def info(
    dataset: Annotated[str, typer.Argument(help="Name, .npz file, OGB folder or converted folder.")] = "cora",
    root: Annotated[
        Path | None,
        typer.Option(help="Where names are looked up.", show_default="$JOESTAR_DATA, ~/.cache/joestar, dataset"),
    ] = None,
    split: Annotated[str, typer.Option(help="auto, official or random.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show nodes, edges, degrees, features, classes, splits and memory of a dataset.

    [bold]Examples:[/]

    [cyan]joestar info[/]  the bundled Cora graph

    [cyan]joestar info ogbn-arxiv --root ~/data[/]  the folder into which the ogb package downloads

    [cyan]joestar info my-graph.npz --json[/]
    """
    from joestar.cli.info import describe, print_table
    from joestar.data import load

    facts = describe(load(dataset, root=root, split=split))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_table(facts, out())


@app.command("doctor")
@plain_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check the installation: compiler, kernels, GPU, memory, and a small computation. Exit code 1 if it cannot work.

    [bold]Examples:[/]

    [cyan]joestar doctor[/]

    [cyan]joestar doctor --json > environment.json[/]  to attach to a bug report
    """
    from joestar.cli import doctor as checks

    found = checks.examine()
    if as_json:
        typer.echo(json.dumps(checks.as_json(found), indent=2))
    else:
        checks.print_table(found, out())
    if checks.failed(found):
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Measure speed, against expert-eager PyTorch in the same run.")
app.add_typer(bench, name="bench")


@bench.command("step")
@plain_errors
def bench_step(
    shape: Annotated[str, typer.Option(help="tiny, small, products or papers.")] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    models: Annotated[str, typer.Option(help="Of sage, gcn, gin, gat; by commas.")] = "sage,gcn,gin,gat",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    baselines: Annotated[str, typer.Option(help="Of eager, compile, loader (PyG); by commas, or none.")] = "eager",
    fanouts: Annotated[str, typer.Option(help="Neighbours per hop, from the seeds outwards.")] = "15,10,5",
    hidden: Annotated[int, typer.Option(help="Width of hidden layers.", min=1)] = 128,
    batch_size: Annotated[int, typer.Option(help="Seeds per step.", min=1)] = 1000,
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 20,
    epochs: Annotated[int, typer.Option(help="Whole epochs to time by the wall clock; 0: none.", min=0)] = 3,
    ids: Annotated[str, typer.Option(help="Of planted graphs: shuffled, planted (communities in a row) or both.")] = (
        "shuffled"
    ),
    dataset: Annotated[str | None, typer.Option(help="Name or path, in place of a planted graph: cora.")] = None,
    kernels: Annotated[bool, typer.Option(help="List the GPU kernels of a step.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Time training steps and whole epochs: ms, set-up, memory, launches, and the factor over expert eager.

    [bold]Examples:[/]

    [cyan]joestar bench step --device cpu[/]  200 k nodes, 10 M edges; takes minutes

    [cyan]joestar bench step --device cuda --shape products --precision tf32 --steps 200 --json step.json[/]

    [cyan]joestar bench step --dataset cora --fanouts -1,-1 --hidden 16[/]  one step per epoch
    """
    from joestar.bench.step import IDS, Setting
    from joestar.cli.bench import bench_step, numbers, words

    setting = Setting(
        shape, device, words(models), precision, numbers(fanouts, "--fanouts"), hidden, batch_size=batch_size,
        steps=steps, baselines=words(baselines), kernels=kernels, ids=IDS if ids == "both" else words(ids),
        dataset=dataset, epochs=epochs,
    )  # fmt: skip
    bench_step(setting, json_file, out())


@bench.command("user")
@plain_errors
def bench_user(
    shape: Annotated[str, typer.Option(help="tiny, small, products or papers.")] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    models: Annotated[str, typer.Option(help="Files of examples/user_models, by commas.", show_default="all")] = "all",
    precision: Annotated[str, typer.Option(help="fp32, or tf32 where a GPU's products may use it.")] = "fp32",
    baselines: Annotated[str, typer.Option(help="Of eager, kept (freed memory); by commas, or none.")] = "eager",
    fanouts: Annotated[str, typer.Option(help="Neighbours per hop, from the seeds outwards.")] = "15,10,5",
    hidden: Annotated[int, typer.Option(help="Width of hidden layers.", min=1)] = 128,
    batch_size: Annotated[int, typer.Option(help="Seeds per step.", min=1)] = 1000,
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 15,
    kernels: Annotated[bool, typer.Option(help="List the GPU kernels of a step.")] = False,
    examples: Annotated[str | None, typer.Option(help="Folder of the models.", show_default="of the checkout")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Time models that nobody tuned for, written as users write them, against the same in PyG's layers.

    [bold]Examples:[/]

    [cyan]joestar bench user[/]  eight models on 200 k nodes, 10 M edges; takes minutes

    [cyan]joestar bench user --models gatv2,pna --baselines eager,kept --json user.json[/]
    """
    from joestar.bench.user_models import FOLDER, MODELS, UserSetting
    from joestar.cli.bench import bench_user, numbers, words

    setting = UserSetting(
        shape, device, MODELS if models == "all" else words(models), precision, numbers(fanouts, "--fanouts"), hidden,
        batch_size, steps=steps, baselines=words(baselines), folder=examples or str(FOLDER), kernels=kernels,
    )  # fmt: skip
    bench_user(setting, json_file, out())


@bench.command("inference")
@plain_errors
def bench_inference(
    shape: Annotated[str, typer.Option(help="tiny, small, products or papers.")] = "small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    models: Annotated[str, typer.Option(help="Of sage, gcn, gin, gat; by commas.")] = "sage,gcn,gin,gat",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    layers: Annotated[int, typer.Option(help="Of the model.", min=1)] = 3,
    hidden: Annotated[int, typer.Option(help="Width of hidden layers.", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs over all nodes.", min=1)] = 5,
    budget: Annotated[float | None, typer.Option(help="GiB to use.", show_default="most of what is free")] = None,
    ids: Annotated[str, typer.Option(help="Of planted graphs: shuffled, planted or both.")] = "shuffled",
    dataset: Annotated[str | None, typer.Option(help="Name or path, in place of a planted graph: cora.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """Time exact inference for all nodes from all neighbours, against the bytes that must move.

    [bold]Examples:[/]

    [cyan]joestar bench inference --device cuda --shape products --models sage --precision tf32[/]
    """
    from joestar.bench.step import IDS, Setting
    from joestar.cli.bench import bench_inference, words

    setting = Setting(
        shape, device, words(models), precision, (-1,) * layers, hidden, steps=repeats, warm_up=1, baselines=(),
        ids=IDS if ids == "both" else words(ids), dataset=dataset, epochs=0,
    )  # fmt: skip
    bench_inference(setting, None if budget is None else int(budget * 2**30), json_file, out())


@bench.command("kernels")
@plain_errors
def bench_kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    shape: Annotated[str, typer.Option(help="Planted graph on a GPU: tiny, small, products or papers.")] = "products",
    only: Annotated[str, typer.Option(help="Regular expression of kernel names (GPU).")] = "",
    json_file: Annotated[str | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Time the kernels: on a CPU against torch.sparse and index_add, on a GPU against the copy bandwidth.

    [bold]Examples:[/]

    [cyan]joestar bench kernels[/]  every form of SpMM and its gradients; takes minutes

    [cyan]joestar bench kernels --device cuda --only sample[/]
    """
    from joestar.cli.bench import bench_kernels

    bench_kernels(device, shape, only, json_file, out())


if __name__ == "__main__":
    app()
