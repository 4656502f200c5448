"""What ``test_compile_ahead.py`` runs in a process of its own: kernels of ops and optimizers, before they are launched.

Prints JSON: how many binaries each kernel has after calls with tensors of the meta device, and after real launches.
"""

import json
import threading
from unittest import mock

import compile_only  # noqa: F401  (a driver)
import torch
from triton.runtime.jit import JITFunction, KernelInterface

from joestar.kernels import compile_ahead, gpu_gather_linear, gpu_optimizer, tune
from joestar.ops import ahead
from joestar.ops import optimizer as steps
from joestar.ops.registry import on_gpu

JITFunction.__getitem__ = KernelInterface.__getitem__
RUN = JITFunction.run
TUNED = [gpu_gather_linear._gather_linear, gpu_gather_linear._gather_linear_kept]
STEPS = [gpu_optimizer._adam, gpu_optimizer._sgd]


def compile_now(self, *args, grid, warmup, **kwargs):
    """In place of ``JITFunction.run``: no GPU would launch anything."""
    return RUN(self, *args, grid=grid, warmup=True, **kwargs)


def binaries(kernels) -> list[int]:
    return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]


def now(calls, device) -> None:
    """In place of ``ahead.begin``, which asks for a GPU."""
    compile_ahead.compile_all(calls)


def rows(device: str) -> list[torch.Tensor]:
    """A table, ids, a weight and a bias, enough to be timed."""
    like = {"device": device}
    ids = torch.zeros(20_000, dtype=torch.int32, **like)
    return [torch.zeros(20_000, 96, **like), ids, torch.zeros(64, 96, **like), torch.zeros(64, **like)]


def gathered(device: str) -> None:
    on_gpu(torch.ops.joestar.gather_linear.default)(*rows(device))


def optimizers() -> list[torch.optim.Optimizer]:
    makes = [
        lambda p: torch.optim.Adam(p), lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, momentum=0.9), lambda p: torch.optim.SGD(p),
    ]  # fmt: skip
    nets = [torch.nn.Linear(8, 16) for _ in makes]
    nets[0].bias.requires_grad_(False)  # no gradient, no state
    return [make(net.parameters()) for make, net in zip(makes, nets, strict=True)]


def train(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    steps.allocate(optimizer)
    steps.step(optimizer, torch.zeros(1, steps.COLUMNS, dtype=torch.float64), torch.ones((), dtype=torch.bool))


def main() -> None:
    JITFunction.run = compile_now
    found = {}
    calls = [lambda: gathered("meta"), lambda: gathered("absent")]  # the second one fails
    with mock.patch.object(torch.cuda, "get_device_name", return_value="none"):
        compile_ahead.compile_all(calls)
    found["tuned"] = binaries(TUNED)
    gathered("cpu")  # the first settings
    found["launched"] = binaries(TUNED)
    with mock.patch.dict("os.environ", JOESTAR_TUNE="0"), mock.patch.object(torch.cuda, "get_device_name", str):
        tune.forget()
        compile_ahead.compile_all([lambda: on_gpu(torch.ops.joestar.gather_linear.default)(*rows("meta")[:3], None)])
    found["not timed"] = binaries(TUNED)

    every = optimizers()
    with mock.patch.object(ahead, "begin", now):
        for optimizer in every:
            steps.compile_soon(optimizer)
    found["steps"] = binaries(STEPS)
    found["untouched"] = all(not o.state and all(p.grad is None for p in o.param_groups[0]["params"]) for o in every)
    for optimizer in every:
        train(optimizer)
    found["steps taken"] = binaries(STEPS)

    before, seen = JITFunction.run, []
    both = threading.Barrier(2)

    def within() -> None:
        with compile_ahead.compiled_only():
            both.wait()
            seen.append(compile_ahead.is_compiling())
            both.wait()
        seen.append(compile_ahead.is_compiling())

    threads = [threading.Thread(target=within) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["both"] = sorted(seen), JITFunction.run is before

    called = []
    for number, key in enumerate(["a key", "a key", "another", "in a capture"]):
        recorded = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda key=key: key == "in a capture")
        with recorded:
            compile_ahead.together(lambda number=number: called.append(number), key)
    found["together"] = called
    print(json.dumps(found))


main()
