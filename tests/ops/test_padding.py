"""Every op that padded programs hold as it is: hostile numbers in padded slots change no result and no gradient."""

import pytest
import torch

from joestar.lowering.rules.bounds import _LIMITS
from joestar.ops.registry import OPS, Padding

from .hostile import Call, differences, dst
from .safe_calls import CALLS, EXPLAINED

ops = torch.ops.joestar
OURS = {name: op for name, op in OPS.items() if op.reference.__module__.startswith("joestar.")}  # no page's example
SAFE = {name for name, op in OURS.items() if op.padding is Padding.SAFE}


def test_every_op_has_calls():
    missing = SAFE - CALLS.keys() - EXPLAINED.keys()
    assert not missing, f"ops without calls in safe_calls.py, or a reason why they have none: {sorted(missing)}"
    assert not CALLS.keys() & EXPLAINED.keys() and CALLS.keys() | EXPLAINED.keys() <= SAFE
    trained = {name for name, calls in CALLS.items() if any(x.grad for call in calls for x in call.operands)}
    missing = {name for name in CALLS if isinstance(OPS[name].gradient, tuple)} - trained
    assert not missing, f"ops of whose gradient there is no call: {sorted(missing)}"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CALLS)
def test_op(name, poisoned):
    """Padding of results is finite, and 0 where rules rely on it; the gradient of padded slots is 0."""
    wrong = [
        f"{name}, call {number}: {difference}"
        for number, call in enumerate(CALLS[name])
        for dtype in (torch.float64, torch.float32)
        for difference in differences(call, dtype, zero=_LIMITS.get(name) == 0)
    ]
    assert not wrong, "\n".join(wrong)


FAULTS = {
    "result 0: off by": lambda world, x: x.sum(0),
    "result 0: its padding is not finite": lambda world, x: x * x,
    "result 0: its padding is not 0": lambda world, x: x + 1,
    "gradient 0: off by": lambda world, x: x.softmax(0),
    "gradient 0: its padding is not finite": lambda world, x: ops.mask_rows(
        x / x.norm(dim=1, keepdim=True), world.count, 0, 0
    ),
    "gradient 0: its padding is not 0": lambda world, x: x - x.mean(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    assert any(fault in difference for difference in differences(Call(FAULTS[fault], dst(3)), torch.float32, True))
