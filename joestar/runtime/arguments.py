"""What ``joestar.compile`` was given in place of a model, sampler, loss or optimizer: each mistake has its sentence."""

import torch
from torch.nn.parameter import is_lazy

from joestar.errors import ConfigError, OptimizerError, SamplerError
from joestar.graph_api import Graph

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_LOADERS = {"torch_geometric": "PyG", "dgl": "DGL"}
_SAMPLER = "joestar.NeighborSampler(graph, fanouts=[10, 10])"


def check_model(model) -> None:
    """Raises ``ConfigError`` unless ``model`` is a module that can be compiled."""
    name = type(model).__name__
    if isinstance(model, type):
        raise ConfigError(
            f"model is the class {model.__name__}: expected an instance; construct it, {model.__name__}(...)."
        )
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module; got {name}. The order is compile(model, sampler, ...).")
    if name in _WRAPPERS and type(model).__module__.startswith("torch."):
        raise ConfigError(
            f"model is wrapped in {name}: give the module in it (model.module). Several processes train one model by "
            "joestar.distributed.init() at the top of the script, started with torchrun."
        )
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise ConfigError(
            f"{name} has lazy parameters, whose shapes are not known yet: give the widths when it is constructed."
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{f'{name}.{path}' if path else name} is a module of TorchScript (torch.jit.script, torch.jit.trace), "
                "which cannot be traced: give the module that it was made of; programs are compiled as they are."
            )


def check_sampler(sampler) -> None:
    """Raises ``SamplerError`` unless ``sampler`` has a graph and samples blocks."""
    if callable(getattr(sampler, "sample", None)) and isinstance(getattr(sampler, "graph", None), Graph):
        return
    name, package = type(sampler).__name__, type(sampler).__module__.partition(".")[0]
    if isinstance(sampler, type):
        raise SamplerError(f"sampler is the class {sampler.__name__}: expected an instance, such as {_SAMPLER}.")
    if isinstance(sampler, Graph):
        raise SamplerError(f"sampler is a Graph: expected a sampler over it, such as {_SAMPLER}.")
    if package in _LOADERS:
        how = "joestar.Graph.from_pyg(data)" if package == "torch_geometric" else "joestar.Graph.from_dgl(g)"
        raise SamplerError(
            f"{name} is {_LOADERS[package]}'s: make graph = {how}, and sample it with {_SAMPLER}; batches are asked "
            "for by step.epoch(idx, batch_size)."
        )
    raise SamplerError(
        f"{name} is no sampler: it needs an attribute `graph` (joestar.Graph) and a method "
        "`sample(graph, seeds) -> list[Block]`."
    )


def check_loss(loss_fn) -> None:
    """Raises ``ConfigError`` unless ``loss_fn`` can be called with logits and labels."""
    if isinstance(loss_fn, type):
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}: expected an instance or a function; construct it, "
            f"{loss_fn.__name__}()."
        )
    if loss_fn is None or callable(loss_fn):
        return
    expected = "loss_fn must be a function of (logits, labels), such as torch.nn.functional.cross_entropy"
    if isinstance(loss_fn, str):
        raise ConfigError(f"{expected}; got {loss_fn!r}.")
    raise ConfigError(
        f"{expected}; got {type(loss_fn).__name__}. The order is compile(model, sampler, loss_fn, optimizer)."
    )


def check_optimizer(optimizer) -> None:
    """Raises ``OptimizerError`` unless ``optimizer`` is an optimizer."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return
    expected = "optimizer must be a torch.optim.Optimizer"
    if isinstance(optimizer, type):
        raise OptimizerError(
            f"{expected}; got the class {optimizer.__name__}: construct it, {optimizer.__name__}(model.parameters())."
        )
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise OptimizerError(
            f"{expected}; got the scheduler {type(optimizer).__name__}: give its optimizer here, and call "
            "scheduler.step() yourself, or give it to step.fit(scheduler=...)."
        )
    if isinstance(optimizer, str):
        raise OptimizerError(f"{expected}, such as torch.optim.Adam(model.parameters()); got {optimizer!r}.")
    raise OptimizerError(
        f"{expected}; got {type(optimizer).__name__}. The order is compile(model, sampler, loss_fn, optimizer)."
    )
