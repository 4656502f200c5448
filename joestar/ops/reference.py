"""Plain PyTorch implementations of all ops by name: the ground truth of the tests."""

from joestar.ops.registry import OPS


def __getattr__(name: str):
    if name not in OPS:
        raise AttributeError(f"there is no op {name!r}")
    return OPS[name].reference
