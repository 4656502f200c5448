"""Why training over partitions converges as it does: the same in plain PyTorch, with one thing changed at a time.

    python benchmarks/part_gradients.py --data FOLDER --out results.json [--columns 128 --epochs 40 --seeds 2]

Two layers. Macro-batches are groups of parts, as in accuracy_stages.py; a variant says what the second layer reads for
nodes of other parts (first layer's rows):

    whole      training on the whole graph, in the order of the training nodes: what others are compared with
    order      the order of partitions, everything else as on the whole graph
    detached   computed in the step as on the whole graph, but without a gradient
    fresh      of a forward of the whole graph in evaluation mode, made when the macro-batch begins
    history    as over partitions: pushed in training, macro-batch m sees those up to m - 2
    rate       "history" with twice the learning rate in the first layer
    returned   "history"; the gradients of a row that was read wait, and a fifth of what waits is added each time that a
               step computes the row, in a macro-batch of its node's own part

Results are appended to the file after every run; what is there is not run again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from accuracy_stages import interval
from stage_runs import MACRO_BATCHES, PARTS, RECIPES, Task, chosen, load, network

import joestar
from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
from joestar.runtime.inference import Inference
from joestar.runtime.seeds import shuffled
from joestar.stages.partition_order import partition_order

VARIANTS = ("whole", "order", "detached", "fresh", "history", "rate", "returned")
RETURNED = 0.2


class Loop:
    """A run of a variant, from the weights of a seed; ``epoch`` returns accuracies."""

    def __init__(self, task: Task, graph, parts, variant: str, seed: int):
        self.graph, self.variant, self.seed = graph, variant, seed
        self.recipe, self.part = task.recipe, parts.assignment.long()
        self.stage = joestar.Partitions(parts, PARTS // MACRO_BATCHES).prepare(graph)
        self.sampler = joestar.NeighborSampler(graph, list(self.recipe.fanouts), seed=seed)
        self.model = network(task, graph, seed)
        self.inference = Inference(self.model, graph, 2)
        first, last = self.model.convs
        rate = self.recipe.lr * (2 if variant == "rate" else 1)
        groups = [{"params": list(first.parameters()), "lr": rate}, {"params": list(last.parameters())}]
        self.optimizer = torch.optim.Adam(groups, lr=self.recipe.lr, weight_decay=self.recipe.decay)
        self.rows = torch.zeros(graph.num_nodes, self.recipe.hidden)
        self.known = torch.zeros(graph.num_nodes, dtype=torch.bool)
        self.member = ~self.known
        self.number, self.pushed = -1, []
        self.waiting = torch.zeros_like(self.rows)

    def epoch(self, epoch: int) -> list[float]:
        """(validation, test), per cent."""
        seeds = shuffled(self.graph.train_idx, self.seed, epoch)
        groups, batch = [], self.recipe.batch
        if self.variant == "whole":
            groups = [(None, list(seeds.split(batch)))]
        else:
            order = partition_order(self.stage, seeds, batch, (self.seed, epoch))
            steps = order.seeds.view(-1, batch)
            for parts, first, last in zip(order.groups, order.borders, order.borders[1:], strict=False):
                groups.append((parts[0], [row[row >= 0] for row in steps[first:last]]))
        position = 0
        for index, (parts, batches) in enumerate(groups):
            self._begin(parts, index)
            for some in batches:
                self._step(some, step_key(self.seed, epoch, position, "cpu"))
                position += 1
        right = (self.inference.run(progress=False).argmax(1) == self.graph.ndata["y"]).double()
        return [100 * float(right[ids.long()].mean()) for ids in (self.graph.val_idx, self.graph.test_idx)]

    def _begin(self, parts, index: int) -> None:
        """A macro-batch of these parts, and what it sees."""
        self.number += 1
        if parts is not None:
            self.member = torch.isin(self.part, parts)
        seen = self.number - (1 if index == 0 else 2)
        while self.pushed and self.pushed[0][0] <= seen:
            _, ids, rows = self.pushed.pop(0)
            self.rows[ids], self.known[ids] = rows, True
        if self.variant == "fresh":
            with torch.no_grad():
                self.rows = self.model.eval().convs[0](self.graph, self.graph.ndata["x"])
            self.known.fill_(True)

    def _step(self, seeds, key) -> None:
        model = self.model.train()
        context = self.graph.with_context(SamplingContext(key))
        first, last = self.sampler.sample(context, seeds.to(self.graph.indices.dtype))
        h, ids = model.convs[0](first, self.graph.ndata["x"][first.srcs.long()]), first.dsts.long()
        member = self.member[ids].unsqueeze(1)
        if self.variant == "detached":
            h = torch.where(member, h, h.detach())
        elif self.variant in ("fresh", "history", "rate", "returned"):
            usable = self.member[ids] | self.known[ids]
            if not usable.all():
                last = last.keep_edges(usable[last.indices.long()])
            self.pushed.append((self.number, ids[self.member[ids]], h.detach()[self.member[ids]]))
            own, read = h, self.rows[ids].requires_grad_(self.variant == "returned")
            h = torch.where(member, own, read)
        loss = F.cross_entropy(model.convs[1](last, model._between(model.norms[0], h)), self.graph.ndata["y"][seeds])
        self.optimizer.zero_grad()
        if self.variant == "returned":
            mine = self.member[ids]
            loss = loss + RETURNED * (own[mine] * self.waiting[ids[mine]]).sum()
        loss.backward()
        if self.variant == "returned":
            self.waiting[ids[mine]] *= 1 - RETURNED
            self.waiting[ids] += torch.where(member, 0, read.grad)
        self.optimizer.step()


def table(found: list[dict], epochs: int) -> str:
    """Test accuracy at the best validation epoch, less that of "whole", with a 95 % interval over the seeds."""
    tests = {(run["variant"], run["seed"]): chosen(run["curve"][:epochs])["test"] for run in found}
    lines = [f"{epochs} epochs"]
    for variant in VARIANTS:
        seeds = [s for v, s in tests if v == variant and ("whole", s) in tests]
        if seeds:
            mean, low, high = interval([tests[variant, s] - tests["whole", s] for s in seeds])
            test = statistics.fmean(tests[variant, s] for s in seeds)
            lines.append(f"{variant:9}{len(seeds):4}{test:7.2f}{mean:+7.2f}{low:+7.2f}{high:+7.2f}")
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("dataset"), help="folder of the .npz files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--graph", default="amazon-computers", choices=RECIPES)
    parser.add_argument("--model", default="gat")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    task = Task(options.graph, options.model, "plain", RECIPES[options.graph], columns=options.columns)
    setting = [options.graph, options.model, options.columns, options.epochs]
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else []
    if any(run["setting"] != setting for run in found):
        sys.exit(f"{options.out} is of another setting: choose another --out, or remove it.")
    graph = load(task, options.data)
    parts = joestar.partition(graph, PARTS)
    for seed in range(options.seeds):
        for variant in options.variants:
            if any((run["variant"], run["seed"]) == (variant, seed) for run in found):
                continue
            torch.manual_seed(seed)
            loop = Loop(task, graph, parts, variant, seed)
            curve = [loop.epoch(epoch) for epoch in range(options.epochs)]
            found.append({"setting": setting, "variant": variant, "seed": seed, "curve": curve})
            options.out.write_text(json.dumps(found), encoding="utf-8")
            print(f"{variant} seed {seed}: {curve[-1]}", flush=True)
    for epochs in (options.epochs // 2, options.epochs):
        print(table(found, epochs))


if __name__ == "__main__":
    main()
