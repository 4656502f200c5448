"""The ``joestar`` command. What is slow to import (PyTorch, the compiler) is imported by the command that needs it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from joestar import __version__
from joestar.cli import bench_commands, data_commands, partition, plan
from joestar.cli.config import PROFILED, TrainConfig
from joestar.cli.console import out, plain_errors
from joestar.cli.flags import takes_settings
from joestar.cli.help import Command, Group, option

app = typer.Typer(
    name="joestar",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SPLITS = "auto|official|random"
NODES = "train|val|test|all"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"joestar {__version__}")
        raise typer.Exit()


@app.callback()
def joestar(
    version: Annotated[
        bool, option("Show the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train graph neural networks on sampled neighbourhoods, with the whole training step compiled into one program.

    Examples:
        joestar doctor                       # is everything there?
        joestar info cora                    # what is in a dataset?
        joestar train cora --save best.pt    # train on the bundled Cora graph
        joestar evaluate best.pt             # score what was saved
        joestar profile --html report.html   # where does a step's time go?
    """


def train(
    config: TrainConfig,
    gpus: Annotated[
        int | None,
        option(
            "GPUs of this machine, a process each; --batch-size is per GPU.", metavar="N", rich_help_panel="Execution"
        ),
    ] = None,
    processes: Annotated[
        int | None, option("The same on CPUs, or whatever --device says.", metavar="N", rich_help_panel="Execution")
    ] = None,
) -> None:
    """Train a model on a dataset, and report the test score at the best validation epoch.

    Ctrl-C and SIGTERM stop a run; what --save, --report and --checkpoints ask for is written then, too.

    Examples:
        joestar train                                  # GraphSAGE on Cora, a minute
        joestar train --model gat --heads 8 --patience 20
        joestar train my-graph.npz --save best.pt      # your graph
        joestar train --config run.toml --lr 0.003     # a file of settings
        joestar train ogbn-products --root data --fanouts 15,10,5 --hidden 256
        joestar train ogbn-products --gpus 4           # four processes
    """
    from joestar.cli import several

    number = several.processes_of(gpus, processes, config.device)
    if not several.is_launched() and number > 1:
        several.launch(number)
    if several.is_launched():
        several.check_launched(number)
    with several.joined(out(), config.device, gpus is not None) as console:
        from joestar.cli.train import run

        run(config, console)


app.command("train", cls=Command)(plain_errors(takes_settings(train)))

Saved = Annotated[Path, typer.Argument(help="File that `joestar train --save` wrote.", metavar="SAVED")]
SavedDataset = Annotated[
    str | None,
    typer.Argument(help="Name or path of a graph.", metavar="DATASET", show_default="that of the training"),
]
Root = Annotated[
    Path | None,
    option("Where names are looked up.", metavar="FOLDER", show_default="$JOESTAR_DATA, ~/.cache/joestar, dataset"),
]
Full = Annotated[bool, option("All neighbours of every node instead of samples.", "--full")]
Batch = Annotated[int | None, option("Nodes per step.", min=1, metavar="N", show_default="that of the training")]
Device = Annotated[str, option("Where to compute; auto: a GPU if there is one.", metavar="auto|cpu|cuda")]
AsJson = Annotated[bool, option("Print JSON instead of a table.", "--json")]


@app.command("evaluate", cls=Command)
@plain_errors
def evaluate(
    saved: Saved,
    dataset: SavedDataset = None,
    nodes: Annotated[str, option("Nodes to score.", metavar=NODES)] = "test",
    full: Full = False,
    batch_size: Batch = None,
    root: Root = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a saved model on the labelled nodes of a graph.

    Without further flags it gives the test score that the training has printed: the same samples are drawn.

    Examples:
        joestar evaluate best.pt                 # the test nodes of its graph
        joestar evaluate best.pt --full --json   # exact, from all neighbours
        joestar evaluate best.pt other.npz --nodes all
    """
    from joestar.cli.predict import evaluate

    facts = evaluate(saved, dataset, root, nodes, batch_size, full, device, out(), quiet=as_json)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))


@app.command("predict", cls=Command)
@plain_errors
def predict(
    saved: Saved,
    dataset: SavedDataset = None,
    output: Annotated[
        str, option("A .csv (node, prediction, score) or .npy (logits) file.", "--out", metavar="FILE")
    ] = "predictions.csv",
    nodes: Annotated[str, option("Nodes to predict for.", metavar=NODES)] = "all",
    full: Full = False,
    batch_size: Batch = None,
    root: Root = None,
    device: Device = "auto",
) -> None:
    """Predict with a saved model for the nodes of a graph.

    A CSV file has one line per node: its id, the predicted class (of several tasks: those predicted, by spaces), and
    the probability of that. An .npy file has the logits, float32 [nodes, classes], in the order of ids or of the split.

    Examples:
        joestar predict best.pt                            # predictions.csv
        joestar predict best.pt other.npz --out logits.npy
        joestar predict best.pt --nodes test --full        # exact
    """
    from joestar.cli.predict import predict

    predict(saved, dataset, root, nodes, batch_size, full, device, output, out())


def profile(
    config: TrainConfig,
    steps: Annotated[int, option("Timed steps of every stage.", min=1, rich_help_panel="Execution")] = 20,
    ablation: Annotated[bool, option("Also time the stages before the last.", rich_help_panel="Execution")] = True,
    tune: Annotated[
        bool, option("Add a stage that makes its choices by timing.", "--tune", rich_help_panel="Execution")
    ] = False,
    html: Annotated[
        str | None, option("Write the report as one HTML page.", "--html", metavar="FILE", rich_help_panel="Output")
    ] = None,
    json_file: Annotated[
        str | None, option("Write the report as JSON.", "--json", metavar="FILE", rich_help_panel="Output")
    ] = None,
) -> None:
    """Show where the time of a training step goes, what fusing and compiling bring, and how full the bounds are.

    Nothing is saved but the report: the model trains on copies.

    Examples:
        joestar profile --html report.html      # GraphSAGE on Cora, about a minute
        joestar profile my-graph.npz --json report.json
    """
    from joestar.cli.profile import run

    run(config, steps, ablation, tune, html, json_file, out())


app.command("profile", cls=Command)(plain_errors(takes_settings(profile, PROFILED)))


@app.command("info", cls=Command)
@plain_errors
def info(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name (also pyg:..., ogb:...), .npz file, or a folder: edges.csv and nodes.csv, of OGB, or converted.",
            metavar="DATASET",
        ),
    ] = "cora",
    root: Root = None,
    split: Annotated[str, option("The official one, a random 60/20/20, or auto.", metavar=SPLITS)] = "auto",
    verify: Annotated[bool, option("Of a converted folder: read all of it, compare checksums.", "--verify")] = False,
    as_json: AsJson = False,
) -> None:
    """Show nodes, edges, degrees, features, classes, splits and memory of a dataset.

    Of a converted folder only its description and small files are read.

    Examples:
        joestar info                             # the bundled Cora graph
        joestar info graphs/papers               # a converted folder, at once
        joestar info my-graph.npz --json
        joestar info ogbn-arxiv --root ~/data    # where the ogb package downloads
    """
    from joestar.cli.info import facts_of, print_table

    facts = facts_of(dataset, root, split, verify)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_table(facts, out())


@app.command("doctor", cls=Command)
@plain_errors
def doctor(as_json: AsJson = False) -> None:
    """Check the installation: compiler, kernels, GPU, memory, and a small computation. Exit code 1 if it cannot work.

    Examples:
        joestar doctor
        joestar doctor --json > environment.json    # to attach to a bug report
    """
    from joestar.cli import doctor as checks

    found = checks.examine()
    if as_json:
        typer.echo(json.dumps(checks.as_json(found), indent=2))
    else:
        checks.print_table(found, out())
    if checks.failed(found):
        raise typer.Exit(1)


app.command("generate", cls=Command)(data_commands.generate)
app.command("convert", cls=Command)(data_commands.convert)
partition.add_to(app)
plan.add_to(app)
app.add_typer(bench_commands.app, name="bench")

if __name__ == "__main__":
    app()
