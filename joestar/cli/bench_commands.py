"""``joestar bench step | user | passes | inference | epoch | kernels``: their flags."""

from typing import Annotated

import typer

from joestar.cli.console import out, plain_errors
from joestar.cli.help import Command, Group, option

app = typer.Typer(cls=Group, no_args_is_help=True, help="Measure speed, against expert-eager PyTorch in the same run.")

SHAPES = ("tiny", "mini", "small", "products", "papers", "papers100M", "mag240m-c")
"""Names of ``joestar.data.planted.SHAPES``, which takes seconds to import."""
Shape = Annotated[str, option(f"Planted graph: {', '.join(SHAPES)}.", metavar="NAME")]
MODES = (
    "resident", "pinned", "match", "match-reorder", "cached", "cached-match", "large-batch", "large-batch-cold",
    "partitions", "cpu",
)  # fmt: skip
"""Names of ``joestar.bench.epoch.MODES``."""
Device = Annotated[str, option("Where to measure.", metavar="cpu|cuda")]
Models = Annotated[str, option("Of sage, gcn, gin, gat; by commas.", metavar="NAMES")]
Precision = Annotated[str, option("Of parameters and products.", metavar="fp32|tf32|bf16")]
Fanouts = Annotated[str, option("Neighbours per hop, from the seeds outwards.", metavar="N,N,...")]
Hidden = Annotated[int, option("Width of hidden layers.", min=1)]
Batch = Annotated[int, option("Seeds per step.", min=1)]
Steps = Annotated[int, option("Timed steps.", min=1)]
Kernels = Annotated[bool, option("List the GPU kernels of a step.", "--kernels")]
Dataset = Annotated[str | None, option("In place of a planted graph: cora, or a path.", "--dataset", metavar="DATASET")]
Ids = Annotated[
    str, option("Ids of planted graphs: shuffled, or communities in a row.", metavar="shuffled|planted|both")
]
Json = Annotated[str | None, option("Write everything to this file.", "--json", metavar="FILE")]


@app.command("step", cls=Command)
@plain_errors
def step(
    shape: Shape = "small",
    device: Device = "cpu",
    models: Models = "sage,gcn,gin,gat",
    precision: Precision = "fp32",
    baselines: Annotated[
        str, option("Of eager, compile, loader (PyG); by commas, or none.", metavar="NAMES")
    ] = "eager",
    fanouts: Fanouts = "15,10,5",
    hidden: Hidden = 128,
    batch_size: Batch = 1000,
    steps: Steps = 20,
    epochs: Annotated[int, option("Whole epochs to time by the wall clock; 0: none.", min=0)] = 3,
    ids: Ids = "shuffled",
    dataset: Dataset = None,
    prefetch: Annotated[bool, option("Joestar's batches a step ahead: compile(prefetch=True).", "--prefetch")] = False,
    kernels: Kernels = False,
    json_file: Json = None,
) -> None:
    """Time training steps and whole epochs: ms, set-up, memory, launches, and the factor over expert eager.

    Examples:
        joestar bench step                                 # 200 k nodes, minutes
        joestar bench step --device cuda --shape products  # the size of OGB's
        joestar bench step --dataset cora --fanouts -1,-1  # one step per epoch
    """
    from joestar.bench.setting import IDS, Setting
    from joestar.cli.bench import bench_step, numbers, words

    setting = Setting(
        shape, device, words(models), precision, numbers(fanouts, "--fanouts"), hidden, batch_size=batch_size,
        steps=steps, baselines=words(baselines), kernels=kernels, ids=IDS if ids == "both" else words(ids),
        dataset=dataset, epochs=epochs, prefetch=prefetch,
    )  # fmt: skip
    bench_step(setting, json_file, out())


@app.command("user", cls=Command)
@plain_errors
def user(
    shape: Shape = "small",
    device: Device = "cpu",
    models: Annotated[str, option("Files of examples/user_models, by commas.", metavar="NAMES")] = "all",
    precision: Annotated[str, option("tf32 where a GPU's products may use it.", metavar="fp32|tf32")] = "fp32",
    baselines: Annotated[str, option("Of eager, kept (freed memory); by commas, or none.", metavar="NAMES")] = "eager",
    fanouts: Fanouts = "15,10,5",
    hidden: Hidden = 128,
    batch_size: Batch = 1000,
    steps: Steps = 15,
    kernels: Kernels = False,
    examples: Annotated[
        str | None, option("Folder of the models.", metavar="FOLDER", show_default="that of the checkout")
    ] = None,
    json_file: Json = None,
) -> None:
    """Time models that nobody tuned for, written as users write them, against the same in PyG's layers.

    Examples:
        joestar bench user                  # all models, 200 k nodes, minutes
        joestar bench user --models gatv2,pna --baselines eager,kept
    """
    from joestar.bench.user_models import FOLDER, MODELS, UserSetting
    from joestar.cli.bench import bench_user, numbers, words

    setting = UserSetting(
        shape, device, MODELS if models == "all" else words(models), precision, numbers(fanouts, "--fanouts"), hidden,
        batch_size, steps=steps, baselines=words(baselines), folder=examples or str(FOLDER), kernels=kernels,
    )  # fmt: skip
    bench_user(setting, json_file, out())


@app.command("passes", cls=Command)
@plain_errors
def passes(
    shape: Shape = "small",
    device: Device = "cpu",
    models: Annotated[str, option("Of sage, gcn, gin, gat and the user models; by commas.", metavar="NAMES")] = "all",
    only: Annotated[str, option("Passes to leave out in turn; by commas.", metavar="NAMES")] = "fired",
    precision: Annotated[str, option("tf32 where a GPU's products may use it.", metavar="fp32|tf32")] = "fp32",
    fanouts: Fanouts = "15,10,5",
    hidden: Hidden = 128,
    batch_size: Batch = 1000,
    steps: Steps = 15,
    examples: Annotated[
        str | None, option("Folder of the user models.", metavar="FOLDER", show_default="that of the checkout")
    ] = None,
    json_file: Json = None,
) -> None:
    """Time every model without each pass that rewrites it, one at a time: what a pass earns.

    Examples:
        joestar bench passes --models sage,gin              # 200 k nodes, on the CPU
        joestar bench passes --device cuda --shape products --precision tf32
    """
    from joestar.bench.passes import MODELS
    from joestar.bench.user_models import FOLDER, UserSetting
    from joestar.cli.bench import bench_passes, numbers, words

    setting = UserSetting(
        shape, device, MODELS if models == "all" else words(models), precision, numbers(fanouts, "--fanouts"), hidden,
        batch_size, steps=steps, baselines=(), folder=examples or str(FOLDER),
    )  # fmt: skip
    bench_passes(setting, None if only == "fired" else words(only), json_file, out())


@app.command("inference", cls=Command)
@plain_errors
def inference(
    shape: Shape = "small",
    device: Device = "cpu",
    models: Models = "sage,gcn,gin,gat",
    precision: Precision = "fp32",
    layers: Annotated[int, option("Of the model.", min=1)] = 3,
    hidden: Hidden = 128,
    repeats: Annotated[int, option("Timed runs over all nodes.", min=1)] = 5,
    budget: Annotated[float | None, option("GiB to use.", metavar="X", show_default="most of what is free")] = None,
    ids: Ids = "shuffled",
    dataset: Dataset = None,
    json_file: Json = None,
) -> None:
    """Time exact inference for all nodes from all neighbours, against the bytes that must move.

    Examples:
        joestar bench inference --models sage                   # on the CPU
        joestar bench inference --device cuda --shape products  # on a GPU
    """
    from joestar.bench.setting import IDS, Setting
    from joestar.cli.bench import bench_inference, words
    from joestar.errors import ConfigError

    if budget is not None and not 0 < budget < 2**34:
        raise ConfigError(f"--budget must be a number of GiB above 0, such as 1.5; got {budget:g}.")
    setting = Setting(
        shape, device, words(models), precision, (-1,) * layers, hidden, steps=repeats, warm_up=1, baselines=(),
        ids=IDS if ids == "both" else words(ids), dataset=dataset, epochs=0,
    )  # fmt: skip
    bench_inference(setting, None if budget is None else int(budget * 2**30), json_file, out())


@app.command("epoch", cls=Command)
@plain_errors
def epoch(
    shape: Shape = "small",
    device: Device = "cpu",
    budget: Annotated[str, option("Memory of the device that may be used.", metavar="SIZE")] = "24GiB",
    modes: Annotated[str, option(f"Of {', '.join(MODES)}; by commas.", metavar="NAMES", show_default="all")] = "all",
    models: Models = "sage",
    precision: Annotated[
        str, option("Of products; bf16, fp16: of features, too.", metavar="fp32|tf32|bf16|fp16")
    ] = "fp32",
    fanouts: Fanouts = "15,10,5",
    hidden: Hidden = 128,
    batch_size: Batch = 1000,
    epochs: Annotated[int, option("Whole epochs, after a first one.", min=1)] = 3,
    ids: Ids = "shuffled",
    dataset: Dataset = None,
    scale: Annotated[float, option("Times as many nodes and training nodes.", metavar="X")] = 1.0,
    features: Annotated[int | None, option("Columns of features, in place of the shape's.", min=1, metavar="N")] = None,
    heads: Annotated[
        int | None, option("Attention heads of gat, which share --hidden.", min=1, metavar="N", show_default="4")
    ] = None,
    busy: Annotated[bool, option("Look how busy the GPU is, in a further epoch.", "--busy/--no-busy")] = True,
    gpus: Annotated[
        str | None, option("On so many GPUs, one number after the other, instead of modes.", metavar="N,N,...")
    ] = None,
    processes: Annotated[str | None, option("The same with processes on --device.", metavar="N,N,...")] = None,
    backend: Annotated[str, option("Of --gpus and --processes.", metavar="inductor|eager")] = "inductor",
    json_file: Json = None,
) -> None:
    """Time whole epochs of a graph that may be larger than the device, fed in every way, under one memory budget.

    Rows are printed, and written to the file of --json, as soon as they are there.

    With --gpus, whole epochs of a graph that is on every GPU: speed-up, time and bytes of the sums over them.

    Examples:
        joestar bench epoch --budget 60MiB                     # on the CPU
        joestar bench epoch --device cuda --shape papers100M   # on a GPU
        joestar bench epoch --shape mag240m-c --scale 0.0001 --precision fp16
        joestar bench epoch --gpus 1,2,4 --shape papers --models sage,gat
        joestar bench epoch --gpus 1,2 --models gat --heads 8 --features 1024
    """
    from joestar.bench.setting import IDS, Setting
    from joestar.cli.bench import bench_epoch, numbers, words
    from joestar.errors import ConfigError

    chosen = words(models)
    if heads is not None and "gat" not in chosen:
        raise ConfigError(f"--heads is of gat, which --models {models} does not name.")
    setting = Setting(
        shape, device, chosen, precision, numbers(fanouts, "--fanouts"), hidden, batch_size, baselines=(),
        ids=IDS if ids == "both" else words(ids), dataset=dataset, epochs=epochs, scale=scale, features=features,
        **({} if heads is None else {"heads": heads}),
    )  # fmt: skip
    if gpus is not None or processes is not None:
        from joestar.cli.bench_scaling import bench_scaling

        bench_scaling(setting, gpus, processes, json_file, out(), backend)
        return
    bench_epoch(setting, budget, MODES if modes == "all" else words(modes), json_file, out(), busy)


@app.command("kernels", cls=Command)
@plain_errors
def kernels(
    device: Device = "cpu",
    shape: Annotated[str, option(f"On a GPU, planted graph: {', '.join(SHAPES)}.", metavar="NAME")] = "products",
    only: Annotated[str | None, option("Kernels whose names match (GPU).", metavar="REGEX")] = None,
    json_file: Annotated[str | None, option("Write the rows to this file.", "--json", metavar="FILE")] = None,
) -> None:
    """Time the kernels: on a CPU against torch.sparse and index_add, on a GPU against the copy bandwidth.

    Examples:
        joestar bench kernels                              # every SpMM, minutes
        joestar bench kernels --device cuda --only sample  # some, on a GPU
    """
    from joestar.cli.bench import bench_kernels

    bench_kernels(device, shape, only or "", json_file, out())
