"""What ranks do in the tests of sums by our kernel, in Triton's interpreter: over memory of the host, which all map."""

import contextlib
import random
import time
from collections.abc import Iterator
from unittest import mock

import torch

import joestar
from joestar.distributed import peer_sum
from joestar.distributed.peer_memory import NoPeerAccessError
from joestar.distributed.peer_sum import PeerSum, shared_region
from joestar.distributed.reduction import TOGETHER, Reduction
from joestar.kernels import gpu_ranks
from tests.distributed import scenarios

SHAPES = [(7, 130), (1,), (33,), (), (1500,)]
SIZES = [0, 1, 5, 16, 17, 1023, 1024, 1025, 3000]


@contextlib.contextmanager
def interpreted(programs: int = 3) -> Iterator[list]:
    """Sums are made by the kernel, on CPUs, by few programs; yields what was made."""
    made, of = [], PeerSum.of.__func__

    def noted(cls, group, out):
        made.append(of(cls, group, out))
        return made[-1]

    with (
        mock.patch.object(peer_sum, "serves", return_value=True),
        mock.patch.object(PeerSum, "of", classmethod(noted)),
        mock.patch.object(gpu_ranks, "PROGRAMS", programs),
    ):
        yield made


def gradients(rank: int, number: int, dtype: torch.dtype, pieces: int = len(SHAPES)) -> list[torch.Tensor]:
    """What a rank adds in a sum; of various dtypes, one of them not contiguous; of drawn sizes if there are few."""
    draw, sizes = torch.Generator().manual_seed(1000 * rank + number), random.Random(number)
    shapes = [SHAPES[i % len(SHAPES)] for i in range(pieces)]
    if pieces < len(SHAPES):
        shapes = [(2, sizes.choice(SIZES)), *((sizes.choice(SIZES),) for _ in range(1, pieces))]
    found = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]
    found[0] = found[0].t().contiguous().t()
    found[-1] = found[-1].bfloat16()
    return found


def sums(dtype: torch.dtype, pieces: int = len(SHAPES)) -> list[dict]:
    """Of several steps: ranks are early and late, one has no share of the loss, one blames a step."""
    group = joestar.distributed.init(timeout=20.0, device="cpu")
    pauses, found = random.Random(group.rank), []
    with interpreted() as made:
        reduction = Reduction(group)
        for number in range(7):
            grads = gradients(group.rank, number, dtype, pieces)
            parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            none = number == 3 and group.rank == 1
            if none:
                grads[1].fill_(torch.nan)
            shares = torch.tensor([0.0 if none else 0.25 + group.rank, 0.5, 2.0], dtype=torch.float64)
            buffers = [torch.full((2, 3), 1.0 + group.rank), torch.tensor(number)] if number > 4 else []
            reduction.before(buffers)
            for buffer in buffers:
                buffer += 1
            ok = torch.tensor(not (number % 5 == 1 and group.rank == 0))
            loss, logged = torch.tensor(1.5 + group.rank, dtype=dtype), [torch.tensor(float(number))]
            if pauses.random() < 0.3:
                time.sleep(0)
            total, others, happens = reduction(parameters, loss, logged, ok, shares)
            found.append({
                "grads": [p.grad.double().flatten().tolist() for p in parameters], "loss": float(total),
                "logged": float(others[0]), "happens": bool(happens), "buffers": [b.tolist() for b in buffers],
            })  # fmt: skip
    assert made and all(made)
    assert (pieces > TOGETHER) == (len(SHAPES) < pieces)
    return found


def captured(dtype: torch.dtype, replays: int) -> list[dict]:
    """On GPUs: sums within a CUDA graph, whose ranks are early and late, one of which has no share of some."""
    group = joestar.distributed.init(timeout=20.0, device="cuda")
    device, pauses, made, found = group.device, random.Random(group.rank), [], []
    reduction = Reduction(group)
    grads = [grad.to(device) for grad in gradients(group.rank, 0, dtype)]
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    shares = torch.tensor([0.25 + group.rank, 0.5, 2.0], dtype=torch.float64, device=device)
    ok = torch.ones((), dtype=torch.bool, device=device)
    loss, logged = torch.tensor(1.5 + group.rank, dtype=dtype, device=device), torch.zeros((), device=device)

    def summed() -> tuple:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        return reduction(parameters, loss, [logged], ok, shares)

    summed()
    made = [layout.peers for layout in reduction._layouts.values()]
    assert len(made) == 1 and made[0] is not None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total, (other,), happens = summed()
    for number in range(replays):
        for grad, value in zip(grads, gradients(group.rank, number, dtype), strict=True):
            grad.copy_(value)
        if number == 3 and group.rank == 1:
            grads[1].fill_(torch.nan)
        shares[0] = 0.0 if number == 3 and group.rank == 1 else 0.25 + group.rank
        ok.fill_(not (number % 5 == 1 and group.rank == 0))
        logged.fill_(number)
        if pauses.random() < 0.3:
            torch.cuda.synchronize()
        graph.replay()
        found.append({
            "grads": [p.grad.double().flatten().tolist() for p in parameters], "loss": float(total),
            "logged": float(other), "happens": bool(happens), "buffers": [],
        })  # fmt: skip
    graph.reset()
    return found


def trained(names: list[str], batch: int) -> dict:
    """Whole runs: see ``scenarios``."""
    joestar.distributed.init(timeout=20.0, device="cpu")
    with interpreted(8) as made:
        found = scenarios.all_of(names, batch)
    assert made and all(made)
    return found


def without_peers() -> list[bool]:
    """Whether sums are the kernel's: usually, with another setting, where memory cannot be mapped, for many entries."""
    group = joestar.distributed.init(timeout=20.0, device="cpu")
    out, found = torch.zeros(gpu_ranks.TILE), []

    def lacks(*args):
        raise NoPeerAccessError("cuda:0 does not reach cuda:1")

    with interpreted():
        found.append(PeerSum.of(group, out) is not None)
        with mock.patch.dict("os.environ", {"JOESTAR_RANK_SUM": "nccl"}):
            found.append(PeerSum.of(group, out) is not None)
        with mock.patch.object(peer_sum, "shared_region", lacks):
            found.append(PeerSum.of(group, out) is not None)
        found.append(PeerSum.of(group, torch.zeros(peer_sum.MOST // 4 + gpu_ranks.TILE)) is not None)
        found.append(PeerSum.of(group, out.half()) is not None)
    return [*found, PeerSum.of(group, out) is not None]


def number_wraps() -> list[float]:
    """Sums around the largest number."""
    group = joestar.distributed.init(timeout=20.0, device="cpu")
    out, found = torch.zeros(gpu_ranks.TILE), []
    with interpreted():
        memory = shared_region(group, out)
        own = PeerSum(group, out, memory)
        own._counters.fill_(2**31 - 3)
        memory.own.view(torch.int32)[2 * out.numel() :].fill_(2**31 - 3)
        group.exchange("numbers")
        for number in range(5):
            out.fill_(number + 10 * group.rank)
            own.again()
            found.append(float(out[0]))
    return found


def words(word: str) -> str:
    """What ``init`` says of ``JOESTAR_RANK_SUM``."""
    import os

    os.environ["JOESTAR_RANK_SUM"] = word
    try:
        joestar.distributed.init(timeout=20.0, device="cpu")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "joined"
