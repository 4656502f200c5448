"""``joestar plan``: what goes where under a memory budget, without training."""

import dataclasses
from typing import Annotated

import typer

from joestar.cli.config import FIELDS, OF_PARTITIONS, RUN_ONLY, TrainConfig
from joestar.cli.console import out, plain_errors
from joestar.cli.flags import takes_settings
from joestar.cli.help import Command, option

STAGED = ("memory", "partitions", *OF_PARTITIONS, "macro_batch", "hot")
PLANNED = tuple(name for name in FIELDS if name not in RUN_ONLY or name in STAGED)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("plan", cls=Command)(plain_errors(takes_settings(plan, PLANNED)))


def plan(
    config: TrainConfig,
    gpus: Annotated[
        int | None,
        option(
            "Plan for one of so many GPUs that train together; --batch-size is per GPU.",
            min=1,
            metavar="N",
            rich_help_panel="Execution",
        ),
    ] = None,
    prefetch: Annotated[
        bool,
        option(
            "Count the batch of the next step, too: compile(prefetch=True), where all fits.",
            "--prefetch",
            rich_help_panel="Execution",
        ),
    ] = False,
    json_file: Annotated[
        str | None, option("Write the plan as JSON.", "--json", metavar="FILE", rich_help_panel="Output")
    ] = None,
) -> None:
    """Show how a graph would be trained under a memory budget: what stays on the device, what comes in parts, how long.

    A few macro-batches are sampled for it; nothing is allocated on the device or trained. For several GPUs also what
    each holds where features, or edges, too, are dealt out to them (train --shard).

    Examples:
        joestar plan cora --memory 48MiB
        joestar plan graphs/papers --memory 24GiB --fanouts 15,10,5 --hidden 128
        joestar plan graphs/papers --memory 24GiB --macro-batch 100000 --hot 0
        joestar plan graphs/papers --memory 24GiB --gpus 4
        joestar plan graphs/papers --memory 24GiB --partitions parts.npz --group 96
    """
    import joestar
    from joestar.cli import build
    from joestar.cli.console import say
    from joestar.cli.files import check_outputs, place_of, write_json
    from joestar.errors import ConfigError
    from joestar.staged import Planner
    from joestar.staged.several import imagined
    from joestar.staged.staging import budget_on, free_memory_of, partition_planner
    from joestar.store import plan_graph

    if prefetch and (config.partitions, config.macro_batch, config.hot) != (None, None, None):
        message = "--prefetch is for a graph that fits as a whole, not for --partitions, --macro-batch or --hot."
        raise ConfigError(message)
    read = {"the dataset": place_of(config.dataset, config.root), "--partitions": config.partitions}
    check_outputs({"--json": json_file}, read)
    device, console = build.build_device(config), out()
    graph = joestar.load(config.dataset, root=config.root, split=config.split, seed=config.seed)
    build.check_graph(graph)
    say(console, f"{graph}, for {device}")
    build.say_autocast(build.autocast_of(graph), console)
    model = build.build_model(config, graph).to(device)
    budget = free_memory_of(model) if config.memory is None else budget_on(model, config.memory, "--memory")
    sampler = joestar.NeighborSampler(graph, config.fanouts, seed=config.seed)
    stage = build.build_first_stage(config)
    ranks = None if gpus in (None, 1) else imagined(gpus)
    parts = stage if isinstance(stage, joestar.Partitions) else None
    given = {"first_stage": None if parts else stage, "ranks": ranks, "prefetch": prefetch}
    planner = Planner(model, sampler, budget, batch=config.batch_size, **given)
    ways = features = None
    if ranks is not None and stage is None and not prefetch:
        ways = plan_graph(graph, gpus, budget, planner.beside_graph())
        features = features_of(planner, ways, gpus)
        for line in "\n".join(map(str, filter(None, (ways, features)))).splitlines():
            say(console, line)
    found = planner.plan() if parts is None else partition_planner(planner, parts).plan().plan
    for line in str(found).splitlines():
        say(console, line)
    if json_file is not None:
        found.hot_ids = None
        written = {**dataclasses.asdict(found), "memory": found.memory, "working_set": found.working_set}
        if ways is not None:
            written["over_gpus"] = dataclasses.asdict(ways)
        if features is not None:
            written["features"] = _written(features)
        write_json(json_file, written)


def _written(features) -> dict:
    """As JSON has it: ``None`` for the times of what does not fit."""

    def finite(number: float) -> float | None:
        return number if number < float("inf") else None

    choices = []
    for each in features.choices:
        times = {"seconds": each.seconds, "step": features.step(each), "ahead": features.step_ahead(each)}
        choices.append(dataclasses.asdict(each) | {name: finite(value) for name, value in times.items()})
    return dataclasses.asdict(features) | {"choices": choices, "best": features.best.place}


def features_of(planner, ways, gpus: int):
    """Where features of several GPUs should be, and the step that is expected; ``None`` where that is no question:
    everything fits on each, or edges do not."""
    from joestar.store import plan_features
    from joestar.store.bandwidth import speeds

    if ways.best is None or ways.best.place != "features":
        return None
    x = planner.graph.ndata["x"]
    rates = speeds(planner.device, max(16, x[:1].numel() * x.element_size()))
    given = {"room": ways.room_for_features, "world": gpus, "rates": rates, "computing": planner.step_seconds()}
    return plan_features(planner.graph, planner.sampler, planner.batch, **given)
