"""``joestar.store.shard``: where features of a job with several GPUs go, in one call."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from joestar.distributed import Group, current
from joestar.distributed.facts import digest
from joestar.distributed.peer_memory import (
    NoPeerAccessError,
    attempt,
    check_one_host,
    device_memory,
    host_memory,
    shared_pages,
)
from joestar.errors import ConfigError, DistributedError, say
from joestar.graph_api.arrays import to_tensor
from joestar.graph_api.row_source import RowSource
from joestar.locks import TRACING, synchronize
from joestar.profile.numbers import human_bytes, parse_bytes
from joestar.store.features import FeatureStore, check_outside
from joestar.store.hot import blend, checked_hot, count_needed, inclusion_probabilities
from joestar.store.pinned import COPY_BYTES, Pinned, free_host_bytes, resolved
from joestar.store.sharded import Sharded, fill_shard, keep_hottest, shard_rows
from joestar.whole_numbers import plain

WHAT = "joestar.store.shard"
SAMPLE = 1 << 12
"""Values of the features that ranks compare."""
MARGIN = 64 << 20
"""Bytes of a device that stay free beside shard and hot rows."""
COUNTED = 16
"""Batches that are sampled where inclusion probabilities are not known."""
_LOOK = -3
"""Epoch of the keys under which they are."""


def shard(
    x, hot: int | str | Tensor | Sequence[int] | None = None, *, dtype: torch.dtype | None = None,
    place: str | None = None, device: torch.device | str | None = None,
) -> RowSource:  # fmt: skip
    """Features over the GPUs of this host: ``graph.ndata["x"] = joestar.store.shard(x, hot="8GiB")``.

    All ranks call it, each with the whole of ``x`` on the CPU (a file that is mapped is best: a rank reads its part
    only). Losses, weights and predictions are those of ``x`` itself. Where GPUs do not reach one another's memory, the
    rows stay in page-locked host memory, once for all ranks, with a warning. On CPUs the ranks share the rows' memory.
    A process that is alone puts ``x`` on the device or, where it does not fit, into page-locked host memory.

    Args:
        x: floating-point ``[N, ...]``: a tensor, an array, or whatever has ``shape``, ``dtype`` (PyTorch's) and gives
            tensors for slices of rows, ``x[first:last]``: it is asked for some at a time.
        hot: what every GPU holds as well: bytes or a text such as ``"8GiB"``, for the rows that batches need most often
            as ``joestar.compile`` finds from graph and sampler; or their ids (``choose_hot``).
        dtype: in which rows are stored, by default ``x``'s: float16 and bfloat16 halve memory and traffic.
        place: ``"peers"``: the ranks' memories, or an error; ``"host"``: page-locked host memory, once for all ranks;
            ``None``: peers, or the host where GPUs do not reach one another.
        device: of a process that is alone; ranks have theirs.

    Returns:
        What to assign to ``graph.ndata``.

    Raises:
        ConfigError: on all ranks, if they are on several hosts, or if the shards do not fit; with numbers.
        DataError: for hot ids that are none, and for float64 where rows go to host memory, before any are loaded.
        DistributedError: if ranks call it with different features.
    """
    x = _checked(x, dtype)
    if place not in (None, "peers", "host"):
        raise ConfigError(f"place must be 'peers', 'host' or None; got {place!r}.")
    hot, group = plain(hot), current()
    by_size = hot is None or isinstance(hot, (str, int, float))
    wants = parse_bytes(hot, "hot", least=0) if by_size and hot is not None else 0

    def given() -> Tensor | None:
        return None if by_size else checked_hot(hot, x.shape[0])

    if group is None:
        return _alone(x, given(), wants, dtype or x.dtype, resolved(device), place)
    with group.board.at(WHAT, long=True):
        ids = attempt(group, f"{WHAT} (hot rows)", given)
        facts = {"x": f"{x.dtype} {list(x.shape)} #{_look(x)}", "stored as": str(dtype or x.dtype), "place": str(place)}
        group.agree(WHAT, facts | {"hot": f"{wants} bytes" if ids is None else f"{ids.numel()} ids"})
        check_one_host(group, WHAT)
        source = _spread(x, ids, wants, dtype or x.dtype, group, place)
        if ids is not None:
            attempt(group, f"{WHAT} (hot rows)", lambda: source.keep(ids))
        return source


def _checked(x, dtype: torch.dtype | None):
    x = x if isinstance(getattr(x, "dtype", None), torch.dtype) else to_tensor(x, "shard: x")
    if isinstance(x, Tensor) and x.is_meta:
        raise ConfigError(
            "shard: these features are sharded already, graph.ndata holds no rows: give what they came from."
        )
    for kind in (x.dtype, dtype or x.dtype):
        if not kind.is_floating_point:
            raise ConfigError(
                f"shard takes floating-point features; got {kind}: use .float(), or keep them on every GPU."
            )
    if not math.prod(x.shape) or not len(x.shape):
        raise ConfigError(f"shard takes features [N, ...] with at least a row and a column; got {list(x.shape)}.")
    return x.detach() if isinstance(x, Tensor) else x


def _look(x) -> str:
    """A digest of some values."""
    return digest(x if isinstance(x, Tensor) else x[: min(64, x.shape[0])], SAMPLE)


def _alone(x, ids: Tensor | None, wants: int, dtype: torch.dtype, device: torch.device, place: str | None) -> RowSource:
    needed = math.prod(x.shape) * dtype.itemsize
    there = isinstance(x, Tensor) and x.device == device
    fits = there or device.type != "cuda" or needed + MARGIN <= torch.cuda.mem_get_info(device)[0]
    near = fits and place != "host"
    if not near:
        check_outside(dtype)
    if not isinstance(x, Tensor):
        whole = torch.empty(tuple(x.shape), dtype=dtype, device=device if near else "cpu")
        _fill(x, whole, 0, x.shape[0])
        x = whole
    if near:
        return FeatureStore(x, device, "resident", dtype=dtype)
    if place is None:
        say(
            f"features of {human_bytes(needed)} do not fit on {device}, which has "
            f"{human_bytes(torch.cuda.mem_get_info(device)[0])} free, and there is one process: they stay in "
            "page-locked host memory."
        )
    elif place == "peers":
        raise ConfigError(f"features of {human_bytes(needed)} do not fit on {device}, and there is one process.")
    store = FeatureStore(x.cpu(), device, "pinned" if ids is None else "cached", ids, dtype)
    store.wants = wants
    return store


def _fill(x, out: Tensor, first: int, last: int) -> None:
    """``out[first:last] = x[first:last]``, some rows at a time."""
    step = max(1, COPY_BYTES // max(1, math.prod(x.shape[1:]) * x.dtype.itemsize))
    for begin in range(first, last, step):
        end = min(last, begin + step)
        out[begin:end].copy_(x[begin:end])


def _spread(x, ids: Tensor | None, wants: int, dtype: torch.dtype, group: Group, place: str | None) -> RowSource:
    if place == "host":
        return _on_host(x, wants, dtype, group)
    shape = (shard_rows(x.shape[0], group.world), *x.shape[1:])
    size = torch.Size(shape).numel() * dtype.itemsize
    row = math.prod(x.shape[1:]) * dtype.itemsize
    beside = wants if ids is None else ids.numel() * row + 4 * x.shape[0]
    on_cpu = group.device.type == "cpu"
    if on_cpu:
        _check_host(group, group.world * (size + beside))
    else:
        _check_device(group, size, beside)
    memory, reason = None, ""
    try:
        memory = (host_memory if on_cpu else device_memory)(group, shape, dtype)
    except NoPeerAccessError as error:
        reason = str(error)
    if memory is None and place == "peers":
        raise DistributedError(f"GPUs do not read one another's memory: {reason}")
    if memory is None:
        return _on_host(x, wants, dtype, group, reason)
    attempt(group, f"{WHAT} (loading)", lambda: _load(x, memory.own, group))
    source = Sharded(memory, x.shape, dtype, group.device, wants)
    group.frees_memory(source)
    return source


def _load(x, own: Tensor, group: Group) -> None:
    with torch.no_grad():
        fill_shard(x, own, group.rank, group.world)
    if own.is_cuda:
        synchronize(own.device)  # the others may read once all have come to the next meeting


def _check_device(group: Group, size: int, beside: int) -> None:
    """Refuses on all ranks what does not fit on one."""
    torch.cuda.empty_cache()
    met = group.exchange(f"{WHAT}, room", {"free": torch.cuda.mem_get_info(group.device)[0]})
    for rank, each in enumerate(met):
        if size + beside + MARGIN > each["free"]:
            raise ConfigError(
                f"features do not fit over {group.world} GPUs: each needs {human_bytes(size)} for its part and "
                f"{human_bytes(beside)} for hot rows, and rank {rank} has {human_bytes(each['free'])} free. Take more "
                "GPUs, dtype=torch.bfloat16 or float16, fewer hot rows, or joestar.store.FeatureStore (host memory)."
            )


def _check_host(group: Group, needed: int) -> None:
    free = group.exchange(f"{WHAT}, room", {"free": free_host_bytes()})[0]["free"]
    if free is not None and needed > free:
        raise ConfigError(
            f"features of {human_bytes(needed)} do not fit into host memory: {human_bytes(free)} are free. Take "
            "dtype=torch.bfloat16 or float16, or fewer hot rows."
        )


def _on_host(x, wants: int, dtype: torch.dtype, group: Group, reason: str = "") -> FeatureStore:
    """All rows in page-locked pages that the ranks share, each of which loads a part."""
    check_outside(dtype)  # before rows are loaded
    needed = math.prod(x.shape) * dtype.itemsize
    _check_host(group, needed)
    if group.rank == 0 and reason:
        say(
            f"GPUs do not read one another's memory ({reason}): features stay in page-locked host memory "
            f"({human_bytes(needed)}, once for all ranks) and cross the bus."
        )
    (pages,) = shared_pages(group, [tuple(x.shape), *[None] * (group.world - 1)], dtype)
    first, last = (x.shape[0] * rank // group.world for rank in (group.rank, group.rank + 1))
    attempt(group, f"{WHAT} (loading)", lambda: _fill(x, pages, first, last))
    device = group.device
    store = attempt(group, f"{WHAT} (locking)", lambda: FeatureStore(Pinned(pages, device), device, "pinned"))
    store.wants = wants
    return store


# --- hot rows ---


def choose_hot_rows(sampler, batch: int) -> None:
    """Fills what stores of the sampler's graph want to hold on the device (``shard(hot="8GiB")``).

    Args:
        batch: seeds of a step and rank.
    """
    sources = getattr(sampler.graph.ndata, "sources", {}).values()
    wanting = [source for source in sources if getattr(source, "wants", 0)]
    if wanting:
        score = hotness(sampler, batch)
        for source in wanting:
            keep_hottest(source, score)


@torch.no_grad()
def hotness(sampler, batch: int) -> Tensor:
    """How often batches need each node, as far as can be known before training: float32 ``[N]``.

    From fanouts and degrees (``inclusion_probabilities``) for a sampler with ``fanouts``, else counted over some
    batches, ties by out-degree. Batches are of ``graph.train_idx``, or of all nodes.
    """
    graph, seeds = sampler.graph, _seeds(sampler.graph)
    fanouts = getattr(sampler, "fanouts", None)
    if fanouts is not None and all(isinstance(fanout, int) for fanout in fanouts):
        replace = getattr(sampler, "replace", False)
        return inclusion_probabilities(graph.indptr, graph.indices, fanouts, seeds, min(batch, seeds.numel()), replace)
    counts = count_needed(sampled_batches(sampler, batch, COUNTED), graph.num_nodes, _zeros(graph))
    return blend(counts, graph.out_degrees())


def _zeros(graph) -> Tensor:
    return torch.zeros(graph.num_nodes, dtype=torch.int32, device=graph.device)


def sampled_batches(sampler, batch: int, number: int):
    """Ids that batches of random seeds of ``graph.train_idx``, or of all nodes, need: ``[n]`` each."""
    graph, seeds, random = sampler.graph, _seeds(sampler.graph), torch.Generator("cpu").manual_seed(0)
    for step in range(number):
        if seeds.numel() <= 8 * batch:
            chosen = torch.randperm(seeds.numel(), generator=random, device="cpu")[:batch]
        else:  # hardly any twice
            chosen = torch.randint(0, seeds.numel(), (batch,), generator=random, device="cpu").unique()
        keyed = graph.keyed(getattr(sampler, "seed", 0), _LOOK, step)
        with TRACING:  # as ``profile.sizes.measure``
            blocks = sampler.sample(keyed, seeds[chosen.to(seeds.device)])
        yield blocks[0].srcs


def _seeds(graph) -> Tensor:
    seeds = graph.train_idx
    if seeds is None or not seeds.numel():
        seeds = torch.arange(graph.num_nodes, device=graph.device)
    return seeds.to(graph.device, graph.indices.dtype)
