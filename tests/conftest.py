"""For all tests: without a GPU, Triton's kernels run in its interpreter, on CPU tensors."""

import gc
import os

# Test workers are as many as processors: each with threads of its own, or with Inductor's pool of processes, they wait
# for one another. What needs several threads asks for them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Triton reads the variable when it is first imported, which `import joestar` does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure():
    """Dynamo empties the processor's caches after every capture, for a line of its log that says how long guards take:
    a seventh of a small capture's time. It is imported here, as it imports Triton."""
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *args: 0.0


def pytest_collection_finish():
    """What is loaded now stays: to search it for garbage over and over took a sixth of the fuzzer's time."""
    gc.collect()
    gc.freeze()
