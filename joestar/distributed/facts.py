"""What must be the same on all ranks, as short texts under names that an error can show."""

import hashlib

import torch
from torch import Tensor

SAMPLE = 1 << 16
"""Entries of a large tensor that are looked at, spread over all of it."""
CHUNK = 1 << 20
"""Entries that a checksum is taken of at once."""
_ADDRESSES = (" at 0x", "object at")


def text_digest(text: str) -> str:
    """Twelve hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest(tensor: Tensor, most: int | None = None) -> str:
    """Twelve hexadecimal digits of shape, dtype and values; of so many values, spread evenly, where there are more."""
    flat = tensor.detach().reshape(-1)
    if most is not None and flat.numel() > most:
        flat = flat[torch.linspace(0, flat.numel() - 1, most, dtype=torch.float64, device=flat.device).long()]
    data = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    state = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    state.update(data)
    return state.hexdigest()[:12]


def graph_facts(graph) -> dict[str, str]:
    """Sizes, dtypes and samples of structure and node data."""
    facts = {"graph.num_nodes": str(graph.num_nodes), "graph.num_edges": str(graph.num_edges)}
    tensors = {"indptr": graph.indptr, "indices": graph.indices}
    tensors |= {f"ndata[{name!r}]": value for name, value in graph.ndata.items() if isinstance(value, Tensor)}
    elsewhere = {f"ndata[{name!r}]": source for name, source in getattr(graph.ndata, "sources", {}).items()}
    tensors |= {f"edata[{name!r}]": value for name, value in graph.edata.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.is_meta:  # rows that are nowhere in one piece: compared when they were shared out
            facts[f"graph.{name}"] = repr(elsewhere.get(name, tensor))
            continue
        facts[f"graph.{name}"] = f"{tensor.dtype} {list(tensor.shape)} #{digest(tensor, SAMPLE)}"
    return facts


def model_facts(model: torch.nn.Module) -> dict[str, str]:
    """Its class, and names, shapes and dtypes of parameters and buffers; values come from rank 0."""
    facts = {"model": type(model).__name__}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        trained = "" if value.requires_grad else ", no gradient"
        facts[f"model.{name}"] = f"{value.dtype} {list(value.shape)}{trained}"
    facts["modes of modules"] = _modes(model)
    return facts


def _modes(model: torch.nn.Module) -> str:
    return text_digest(str([module.training for module in model.modules()]))


def values_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What training has made of parameters, buffers and optimizer: bits that must be the same before an epoch."""
    facts = {"modes of modules": _modes(model)}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        facts[f"model.{name}"] = f"#{checksum(value)}"
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                facts[f"optimizer group {number}: {name}"] = plain(value)
    state = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    sums = [f"{name} {checksum(v) if isinstance(v, Tensor) else v!r}" for each in state for name, v in each.items()]
    facts["optimizer state"] = text_digest(" ".join(sums))
    return facts


def checksum(tensor: Tensor) -> int:
    """A sum over the bits of all values, each by its place: it waits for the device once.

    It takes memory for ``CHUNK`` entries, beside a copy of a tensor that is not contiguous.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return 0
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = flat.contiguous().view(sizes[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), CHUNK):
        some = words[start : start + CHUNK]
        place = torch.arange(start, start + some.numel(), device=words.device)
        total += place.mul_(2).add_(1).mul_(some).sum()
    return int(total)


def plain(value) -> str:
    """A value as a text that is the same in every process; its type, if its own text names an address."""
    if isinstance(value, Tensor):
        return f"{value.tolist()}" if value.numel() == 1 else f"#{digest(value)}"
    text = repr(value)
    if any(mark in text for mark in _ADDRESSES):
        return type(value).__name__
    return text if len(text) <= 200 else f"{text[:180]}... #{text_digest(text)}"
