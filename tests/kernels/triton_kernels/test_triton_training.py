"""Whole training steps over the Triton kernels, in the interpreter, against the same over the references."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

import joestar
from joestar.kernels import gpu, gpu_gather_linear_grad, tune
from joestar.kernels.gpu_launch import INTERPRETED
from joestar.ops import reference, registry

pytestmark = [
    pytest.mark.fuzz,  # in `make test` every kernel runs in test_triton_database.py
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu runs the kernels compiled"),
]


PARTS = {"gather_linear", "gather_linears"}
"""Ops that do something around their kernels."""


class OnCpu:
    """While it is entered, ops on CPU tensors run the kernels of a module; ``used`` counts their calls."""

    def __init__(self, module):
        self.module = module
        self.used: dict[str, int] = {}

    def __enter__(self) -> "OnCpu":
        self.overrides = torch.library.Library("joestar", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that kernels are overridden
            for name, op in registry.OPS.items():
                kernel = getattr(self.module, name, None)
                if kernel is not None and name not in PARTS:
                    self.overrides.impl(name, self._counted(name, op.adapt(kernel)), "CPU", allow_override=True)
        return self

    def _counted(self, name, kernel):
        def run(*args, **kwargs):
            self.used[name] = self.used.get(name, 0) + 1
            return kernel(*args, **kwargs)

        return run

    def __exit__(self, *error) -> None:
        self.overrides._destroy()


def losses(module, model: str, options: dict, execution: str = "padded") -> tuple[list[float], list, dict]:
    """(losses, parameters, calls of kernels) of three small steps over the kernels of ``module``."""
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 40, (2, 160), generator=random)
    features, labels = torch.randn(40, 5, generator=random), torch.randint(0, 3, (40,), generator=random)
    with OnCpu(module) as kernels:
        graph = joestar.Graph.from_edge_index(edges, 40, {"x": features, "y": labels})
        torch.manual_seed(1)
        net = getattr(joestar.nn, model)(5, 8, num_layers=2, out_channels=3, **options)
        sampler = joestar.NeighborSampler(graph, [3, 2], seed=3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        step = joestar.compile(
            net, sampler, F.cross_entropy, optimizer, backend="eager", execution=execution, warm_up=2
        )
        found = [float(loss) for loss in list(step.epoch(torch.arange(21), 8))]
    return found, [parameter.detach() for parameter in net.parameters()], kernels.used


CASES = {
    "sage": ("GraphSAGE", {"dropout": 0.5}),
    "gcn": ("GCN", {"dropout": 0.5}),
    "gin": ("GIN", {}),
    "gat": ("GAT", {"dropout": 0.5, "heads": 2}),
}


@pytest.mark.parametrize(("model", "options"), CASES.values(), ids=CASES.keys())
def test_steps_agree_with_the_references(atomic, model, options):
    expected, weights, _ = losses(reference, model, options)
    ours, trained, used = losses(gpu, model, options)
    assert used["take_batch"] == used["finish_step"] == used["overflow"] == 3, used
    assert used["compact"] >= 3 and len(used) >= 7, used
    assert ours == pytest.approx(expected, rel=1e-5)
    for mine, other in zip(trained, weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_exact_steps_agree_with_padded_ones(atomic):
    padded, _, _ = losses(gpu, "GraphSAGE", {"dropout": 0.5})
    assert losses(gpu, "GraphSAGE", {"dropout": 0.5}, "exact")[0] == pytest.approx(padded, rel=1e-5)


class Gated(nn.Module):
    """Two layers of FiLM over all neighbours: the first one's products gather features."""

    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList([nn.Linear(5, 16, bias=False), nn.Linear(16, 16, bias=False)])
        self.film = nn.ModuleList([nn.Linear(5, 32, bias=False), nn.Linear(16, 32, bias=False)])  # else rows are stored
        self.out = nn.Linear(16, 3)

    def forward(self, blocks, x):
        for block, lin, film in zip(blocks, self.lin, self.film, strict=True):
            gamma, beta = film(x[: block.num_dst]).chunk(2, 1)
            x = block.pull(
                lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).tanh(), "mean",
                src={"h": lin(x)}, dst={"g": gamma, "b": beta},
            )  # fmt: skip
        return self.out(x)

    def plain(self, edges, x):
        """The same in PyTorch, of every node of the graph."""
        degree = torch.bincount(edges[1], minlength=len(x)).clamp(min=1)[:, None]
        for lin, film in zip(self.lin, self.film, strict=True):
            gamma, beta = film(x).chunk(2, 1)
            messages = (gamma[edges[1]] * lin(x)[edges[0]] + beta[edges[1]]).tanh()
            x = messages.new_zeros(len(x), 16).index_add(0, edges[1], messages) / degree
        return self.out(x)


@pytest.mark.parametrize("place", range(3))
def test_training_by_gradients_that_gather(place, monkeypatch, ranges):
    """Rows stored, and gathered as they are multiplied by every setting, against a plain loop of PyTorch."""
    taken = []

    def choose(kernel, shape, given, *_):
        taken.append((kernel, given[place] if kernel == "gather_linear_grad" else given[0]))
        return taken[-1][1]

    monkeypatch.setattr(gpu_gather_linear_grad, "in_tensor_cores", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(tune, "choose", choose)
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 40, (2, 160), generator=random)
    features, labels = torch.randn(40, 5, generator=random), torch.randint(0, 3, (40,), generator=random)
    torch.manual_seed(1)
    net = Gated()
    twin = copy.deepcopy(net)
    choices = {"gather:features_0": "in-place"}
    with OnCpu(gpu) as kernels:
        graph = joestar.Graph.from_edge_index(edges, 40, {"x": features, "y": labels})
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [-1, -1]), F.cross_entropy, torch.optim.SGD(net.parameters(), 0.3),
            backend="eager", warm_up=2, choices=choices,
        )  # fmt: skip
        batches = torch.randperm(40, generator=random)[:24].split(8)
        ours = [float(step(seeds)) for seeds in batches]
    assert kernels.used["gather_linear_grad"] >= 3, kernels.used
    wanted = gpu_gather_linear_grad.candidates(features, features)[place]
    made = [config for kernel, config in taken if kernel == "gather_linear_grad"]
    assert made and all(config == wanted for config in made)
    optimizer = torch.optim.SGD(twin.parameters(), 0.3)
    for seeds, loss in zip(batches, ours, strict=True):
        optimizer.zero_grad()
        expected = F.cross_entropy(twin.plain(edges, features)[seeds], labels[seeds])
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-4, atol=1e-5)
