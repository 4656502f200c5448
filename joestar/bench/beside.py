"""The same training without Joestar, to stand beside its stages: PyG's layers, sampling in torch ops, no compiler."""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

import joestar
from joestar.nn.models import BasicGNN

PLAIN = (str, int, float, bool, list, tuple, type(None))


class NotComparableError(Exception):
    """There is no such model in ``joestar.bench.baselines``; the text says why."""


def pyg_name() -> str:
    """What the baseline is, in a few words."""
    return f"PyTorch eager, layers of PyG {importlib.metadata.version('torch_geometric')}"


def pyg_step(
    model: nn.Module, sampler, loss_fn: Callable, optimizer: torch.optim.Optimizer, autocast=None
) -> Callable[[Tensor], Tensor]:
    """A function that trains a fresh model of PyG's layers on the seeds it is given, and returns the loss.

    Args:
        model, sampler, loss_fn, optimizer: as for ``joestar.compile``; what is trained has their sizes and settings.

    Raises:
        NotComparableError: PyG is missing, or model or sampler are none that the baseline has.
    """
    name, heads = _known(model, sampler)
    from joestar.bench.baselines import BlockModel, TorchSampler

    graph = sampler.graph
    x, y = graph.ndata["x"], graph.ndata["y"]
    net = BlockModel(
        name, model.in_channels, model.hidden_channels, model.num_layers, model.out_channels, heads, model.dropout.p
    ).to(graph.device)
    other = type(optimizer)(net.parameters(), **optimizer.defaults)
    blocks = TorchSampler(graph.indptr, graph.indices, list(sampler.fanouts)).blocks

    def step(seeds: Tensor) -> Tensor:
        nodes, edges = blocks(seeds)
        other.zero_grad(set_to_none=True)
        with torch.autocast(graph.device.type, autocast, enabled=autocast is not None):
            loss = loss_fn(net(x[nodes], edges), y[seeds.long()])
        loss.backward()
        other.step()
        return loss.detach()

    return step


def _known(model: nn.Module, sampler) -> tuple[str, int]:
    """(name in ``BlockModel``, heads)."""
    if importlib.util.find_spec("torch_geometric") is None:
        raise NotComparableError(
            "PyG is not installed (pip install torch_geometric): there is no plain PyTorch to compare."
        )
    names = {joestar.nn.GraphSAGE: "sage", joestar.nn.GCN: "gcn", joestar.nn.GIN: "gin", joestar.nn.GAT: "gat"}
    if type(model) not in names:
        raise NotComparableError(
            f"Plain PyTorch is timed for the models of joestar.nn only, not for {type(model).__name__}."
        )
    if type(sampler) is not joestar.NeighborSampler or sampler.replace or sampler.probs is not None:
        raise NotComparableError("Plain PyTorch is timed for uniform samples without replacement only.")
    heads = getattr(model.convs[0], "heads", 1)
    options = {"heads": heads, "add_self_loops": False} if names[type(model)] == "gat" else {}
    common = type(model)(
        model.in_channels, model.hidden_channels, model.num_layers, model.out_channels, dropout=model.dropout.p,
        **options,
    )  # fmt: skip
    if _shape(model) != _shape(common):
        raise NotComparableError(f"Plain PyTorch is timed for {type(model).__name__} with default settings only.")
    return names[type(model)], heads


def _shape(model: BasicGNN) -> list:
    """Whatever tells two models of the same sizes apart."""
    modules = [(name, type(module).__name__, _plain(module)) for name, module in model.named_modules()]
    return [*modules, [(name, list(value.shape)) for name, value in model.state_dict().items()]]


def _plain(module: nn.Module) -> dict:
    return {
        name: value for name, value in vars(module).items() if isinstance(value, PLAIN) and name != "training"
    }  # fmt: skip
