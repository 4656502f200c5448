"""What must be the same on all ranks, as short texts under names that an error can show."""

import hashlib

import torch
from torch import Tensor

from joestar.kernels import has_triton

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
    """Its class, and names, order, shapes and dtypes of parameters and buffers; values come from rank 0."""
    facts = {"model": type(model).__name__}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        trained = "" if value.requires_grad else ", no gradient"
        facts[f"model.{name}"] = f"{value.dtype} {list(value.shape)}{trained}"
    for number, (name, _) in enumerate([*model.named_parameters(), *model.named_buffers()]):
        facts[f"tensor {number} of the model"] = name
    return facts | flags_of(model)


def optimizer_facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, str]:
    """Its class and, in its order, the names of its parameters; shapes of those that are not the model's."""
    facts = {"optimizer": type(optimizer).__name__}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group, given in enumerate([] if optimizer is None else optimizer.param_groups):
        for number, parameter in enumerate(given["params"]):
            other = f"none of the model's, {list(parameter.shape)}"
            facts[f"parameter {number} of the optimizer's group {group}"] = names.get(id(parameter), other)
    return facts


def flags_of(model: torch.nn.Module) -> dict[str, str]:
    """Modes of modules, and which parameters are frozen."""
    modes = text_digest(str([module.training for module in model.modules()]))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return {"modes of modules": modes, "requires_grad is False for": plain(frozen)}


def weights_of(model: torch.nn.Module, seeds: Tensor) -> dict[str, str]:
    """Bits of parameters and buffers, and of seeds: a device is waited for once."""
    return _summed({"model": model}, seeds, [])[0]


def _summed(
    modules: dict[str, torch.nn.Module], seeds: Tensor, further: list[Tensor]
) -> tuple[dict[str, str], list[int]]:
    """``weights_of`` modules, and checksums of further tensors."""
    own = {
        f"{kind}.{name}": value
        for kind, module in modules.items()
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    first, *sums = checksums([seeds, *own.values(), *further])
    facts = {name: f"#{number}" for name, number in zip(own, sums, strict=False)}
    return {"seeds": said_of(seeds, first)} | facts, sums[len(own) :]


def values_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: Tensor, loss: torch.nn.Module | None = None
) -> dict[str, str]:
    """What training has made of parameters, buffers and optimizer: bits that must be the same before an epoch.

    Args:
        seeds: of the epoch: they are looked at with the rest, so that a device is waited for once.
        loss: if it is a module.
    """
    modules = {"model": model} | ({} if loss is None else {"loss": loss})
    state = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    kept = [(name, value) for each in state for name, value in each.items()]
    facts, sums = _summed(modules, seeds, [value for _, value in kept if isinstance(value, Tensor)])
    facts |= flags_of(model)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                facts[f"optimizer group {number}: {name}"] = plain(value)
    rest = iter(sums)
    texts = [f"{name} {next(rest) if isinstance(value, Tensor) else repr(value)}" for name, value in kept]
    facts["optimizer state"] = text_digest(" ".join(texts))
    return facts


def said_of(seeds: Tensor, number: int | None = None) -> str:
    """Seeds as a fact; ``number``: their checksum, if it is known."""
    return f"{seeds.numel()} ids #{checksum(seeds) if number is None else number}"


def checksum(tensor: Tensor) -> int:
    """That of one tensor: see ``checksums``."""
    return checksums([tensor])[0]


def checksums(tensors: list[Tensor]) -> list[int]:
    """Of every tensor, a sum over the bits of all values, each by its place; a device is waited for once, at the end.

    On a GPU it is one launch. Elsewhere small tensors are added up together: a model has many, and each would cost a
    few calls. It takes memory for some ``CHUNK`` entries, beside a copy of a tensor that is not contiguous.
    """
    sums = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    for device, numbers in by_device.items():
        if device.type == "cuda" and has_triton():
            for number, value in zip(numbers, _on_a_gpu([tensors[each] for each in numbers]), strict=True):
                sums[number] = value
            continue
        words = [_words(tensors[number]) for number in numbers]
        groups = _grouped(words)
        most = min(CHUNK, max(1, *(sum(words[each].numel() for each in group) for group in groups)))
        places = torch.arange(1, 2 * most, 2, dtype=torch.int64, device=device)
        parts = [_each([words[each] for each in group], places) for group in groups]
        order = [numbers[each] for group in groups for each in group]
        for number, value in zip(order, torch.cat(parts).tolist(), strict=True):
            sums[number] = value
    return sums


def _on_a_gpu(tensors: list[Tensor]) -> list[int]:
    from joestar.kernels import gpu_checksum

    plain = [tensor.detach().contiguous() for tensor in tensors]
    return gpu_checksum.checksums(plain[0], plain)


def _grouped(words: list[Tensor]) -> list[list[int]]:
    """Tensors that are added up together: of one dtype and at most ``CHUNK`` entries, or one alone."""
    groups: list[list[int]] = []
    room: dict[torch.dtype, int] = {}
    latest: dict[torch.dtype, list[int]] = {}
    for number, each in enumerate(words):
        size, kind = each.numel(), each.dtype
        if kind not in latest or size > room[kind]:
            latest[kind], room[kind] = [], CHUNK
            groups.append(latest[kind])
        latest[kind].append(number)
        room[kind] -= size
    return groups


def _words(tensor: Tensor) -> Tensor:
    """The bits of all values as whole numbers ``[n]``."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.contiguous().view(sizes[flat.element_size()])


def _each(words: list[Tensor], places: Tensor) -> Tensor:
    """``_weighted`` of every tensor, int64 ``[tensors]``: differences of running sums over all of them, which may wrap.

    Args:
        places: 1, 3, 5, ... for at least as many entries as these are together, or for some of a single tensor's.
    """
    if len(words) == 1:
        return _weighted(words[0], places).view(1)
    sizes = torch.tensor([0, *(each.numel() for each in words)], dtype=torch.int64, device="cpu")
    ends = sizes.cumsum(0).to(places.device, non_blocking=True)
    joined = torch.cat(words)
    none = places.new_zeros(1)
    sums, weighted = (
        torch.cat([none, values.cumsum(0, dtype=torch.int64)])[ends].diff()
        for values in (joined, places[: joined.numel()] * joined)
    )
    return weighted - 2 * ends[:-1] * sums


def _weighted(words: Tensor, places: Tensor) -> Tensor:
    """The sum of ``(2 * i + 1) * words[i]``, 0-d; ``places``: 1, 3, 5, ... for some of them."""
    total = places.new_zeros(())
    for start in range(0, words.numel(), CHUNK):
        some = words[start : start + CHUNK]
        total += (places[: some.numel()] * some).sum()
        if start:
            total += some.sum() * (2 * start)
    return total


def plain(value) -> str:
    """A value as a text that is the same in every process; its type, if its own text names an address."""
    if isinstance(value, Tensor):
        return f"{value.tolist()}" if value.numel() == 1 else f"#{digest(value)}"
    text = repr(value)
    if any(mark in text for mark in _ADDRESSES):
        return type(value).__name__
    return text if len(text) <= 200 else f"{text[:180]}... #{text_digest(text)}"
