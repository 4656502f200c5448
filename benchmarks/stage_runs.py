"""Training runs that differ in the first stage alone: compiled once, started over for every seed (accuracy_stages.py).

A seed decides initial weights, the order of the training nodes, samples and dropout. Accuracy is that of exact
inference, from all neighbours, in every mode: differences are those of training.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

import joestar
from joestar.data.generate import Planted, in_memory
from joestar.data.planted import shape_of
from joestar.errors import ConfigError
from joestar.runtime.inference import Inference

MODELS = {"sage": joestar.nn.GraphSAGE, "gat": joestar.nn.GAT}
MACRO_BATCHES = 8
"""Of an epoch."""
PARTS = 64
PLANTED = 50_000
"""Nodes of the planted shape that is scaled, "mini"."""
TRAINED = 0.064
"""Share of its nodes that are trained on."""


@dataclass(frozen=True)
class Recipe:
    """How a data set is trained on: 2 layers, Adam; epochs until the best validation score was seen on every graph."""

    epochs: int
    batch: int = 128
    fanouts: tuple[int, ...] = (15, 10)
    hidden: int = 64
    heads: int = 4
    dropout: float = 0.5
    lr: float = 0.003
    decay: float = 1e-5


RECIPES = {
    "dblp": Recipe(10), "amazon-computers": Recipe(20), "coauthor-physics": Recipe(8), "planted": Recipe(12, 1000),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One combination that is run.

    Attributes:
        data: name of a file in the folder, or ``"planted"``; model: see ``MODELS``; mode: see ``MODES``.
        columns: at most so many features, the ones that are not 0 on the most nodes; 0: all.
        nodes: of the planted graph.
    """

    data: str
    model: str
    mode: str
    recipe: Recipe
    device: str = "cpu"
    backend: str = "inductor"
    columns: int = 0
    nodes: int = 1_000_000

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.data}-{self.model}-{self.mode}"


def load(task: Task, folder: Path):
    """The task's graph, on the CPU."""
    if task.data == "planted":
        shape = shape_of("mini", task.nodes / PLANTED)[1]
        shape = replace(shape, train=int(TRAINED * shape.nodes))
        graph = in_memory(Planted(shape, task.device)).to("cpu")
    else:
        graph = joestar.load(folder / f"{task.data}.npz", verbose=False)
    if task.columns and graph.ndata["x"].shape[1] > task.columns:
        x = graph.ndata["x"]
        often = torch.count_nonzero(x, 0).argsort(descending=True, stable=True)[: task.columns]
        graph.ndata["x"] = x[:, often.sort()[0]].contiguous()
    return graph


def network(task: Task, graph, seed: int) -> torch.nn.Module:
    """A model with the weights of a seed; drawn on the CPU, so the same on every device."""
    torch.manual_seed(seed)
    recipe, options = task.recipe, {"heads": task.recipe.heads} if task.model == "gat" else {}
    return MODELS[task.model](
        graph.ndata["x"].shape[1], recipe.hidden, num_layers=len(recipe.fanouts), out_channels=graph.num_classes,
        dropout=recipe.dropout, **options,
    )  # fmt: skip


# --- modes: a compiled step of a task, its graph on the CPU and its model ---


def single(task: Task, graph, model, seed: int = 0):
    """Graph and features on the device."""
    return _compiled(task, graph.to(task.device), model, seed)


def large_batch(task: Task, graph, model, seed: int = 0):
    """Graph and features on the CPU, macro-batches of an eighth of the training nodes; some rows are cold."""
    batch = task.recipe.batch
    number = max(1, graph.train_idx.numel() // MACRO_BATCHES // batch) * batch
    return _within(task, graph, model, seed, joestar.LargeBatch(number))


def partitions(task: Task, graph, model, seed: int = 0):
    """Likewise, over random groups of an eighth of the parts that GAP makes, with historical embeddings."""
    parts = joestar.partition(graph, PARTS)
    return _within(task, graph, model, seed, joestar.Partitions(parts, PARTS // MACRO_BATCHES))


def _within(task: Task, graph, model, seed: int, stage):
    """Compiled for a budget that is too small for all features, and large enough."""
    budget = 0.4 * sum(v.nbytes for v in (graph.indptr, graph.indices, *graph.ndata.values()))
    budget += 192 << 20 if task.device != "cpu" else 0
    for attempt in range(20):
        try:
            given = {"first_stage": stage, "memory": int(budget), "batch_size": task.recipe.batch}
            return _compiled(task, graph, model, seed, **given)
        except ConfigError as error:
            if "too small" not in str(error):
                raise
            budget *= 1.1 if attempt < 8 else 1.5
    raise ConfigError(f"{task.name}: no budget was large enough.")


MODES: dict[str, Callable] = {"single": single, "large-batch": large_batch, "partitions": partitions}
LIMITS = {"large-batch": 0.15, "partitions": 0.6}
"""How many points the interval of the difference to single-stage may reach below 0."""


def _compiled(task: Task, graph, model, seed: int, **further):
    optimizer = torch.optim.Adam(model.parameters(), lr=task.recipe.lr, weight_decay=task.recipe.decay)
    sampler = joestar.NeighborSampler(graph, list(task.recipe.fanouts), seed=seed)
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend=task.backend, **further)


def chosen(curve: list) -> dict:
    """Of (validation, test) of every epoch, the first one with the best validation accuracy.

    Nothing of a recipe depends on its number of epochs: the first ones of a run are a run that has only these.
    """
    epoch = max(range(len(curve)), key=lambda number: curve[number][0])
    return {"val": curve[epoch][0], "test": curve[epoch][1], "epoch": epoch}


class Runs:
    """A task's compiled step, started over for every seed.

    Args:
        graph: of ``load``. seed: that a run without ``restart`` has, once.
    """

    def __init__(self, task: Task, graph, seed: int = 0):
        self.task, self.graph = task, graph
        self.model = network(task, graph, seed).to(task.device)
        self.step = MODES[task.mode](task, graph, self.model, seed)
        self.near = graph.to(task.device)
        self.inference = Inference(self.model, self.near, len(task.recipe.fanouts))
        self.labels = self.near.ndata["y"]
        self.train_idx = graph.train_idx.to(self.step.whole.device)

    def restart(self, seed: int) -> None:
        """What a new step of this seed would begin with."""
        self.model.load_state_dict(network(self.task, self.graph, seed).state_dict())
        self.step.restart(seed)

    def run(self, seed: int) -> dict:
        """One run from the start: accuracies in per cent."""
        self.restart(seed)
        return {"seed": seed, **self.train()}

    def train(self) -> dict:
        """Epochs from where the step is; accuracies at the best validation epoch, and of every epoch."""
        start, best, curve, weights = time.perf_counter(), -1.0, [], {}
        for _ in range(self.task.recipe.epochs):
            total = sum(loss.detach() for loss in self.step.epoch(self.train_idx, self.task.recipe.batch))
            val, test = self.accuracies()
            curve.append([val, test])
            if val > best:
                best, weights = val, self.step.weights()
        self.model.load_state_dict(weights)
        sampled = 100 * self.step.evaluate(self.graph.test_idx.to(self.train_idx.device))["accuracy"]
        further = {"last": test, "sampled": sampled, "loss": float(total), "seconds": time.perf_counter() - start}
        return chosen(curve) | further | {"curve": curve}

    def accuracies(self) -> tuple[float, float]:
        """On validation and test nodes, from all neighbours, per cent."""
        right = (self.inference.run(progress=False).argmax(1) == self.labels).double()
        parts = [100 * right[ids.to(right.device).long()].mean() for ids in (self.graph.val_idx, self.graph.test_idx)]
        return tuple(torch.stack(parts).tolist())
