"""Operators and joins that are other ops: padded equals exact and eager, as with the ops that they are."""

import pytest
import torch

from joestar.lowering.other_names import OTHER_NAMES, aten

from .harness import OLDER, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")


def in_place(change):
    def operation(m, b, h):
        mask = h > 0
        return h * change(mask, h < 1)

    return operation


def _iand(mask, other):
    mask &= other
    return mask


def _ior(mask, other):
    mask |= other
    return mask


def _ixor(mask, other):
    mask ^= other
    return mask


def test_rows():
    check_rows({
        "a & b": lambda m, b, h: h * ((h > 0) & (h < 1)),
        "a | b": lambda m, b, h: h * ((h > 1) | (h < 0)),
        "a & 3, a | 1": lambda m, b, h: h * (b.srcs & 3)[:, None] + h * (1 | b.srcs)[:, None],
        "a &= b": in_place(_iand),
        "a |= b": in_place(_ior),
        "a ^= b": in_place(_ixor),
        "hstack, column_stack": lambda m, b, h: (
            torch.hstack([h, -h])[:, ::2] + torch.column_stack([h[:, 0], h[:, 1:]])
        ),
        "fliplr": lambda m, b, h: h.fliplr() + h,
        "isclose": lambda m, b, h: h * torch.isclose(h, h.abs()),
        "pairs of rows": lambda m, b, h: (
            h @ h.T * (((h[:, :1] > 0) == (h[:, :1] > 0).T) & ~torch.eye(len(h), dtype=torch.bool))
        ).sum(1, keepdim=True) + h,
    })  # fmt: skip


B = torch.arange(6.0).view(2, 3)
A = torch.tensor([0.0, 1.0, torch.inf, torch.nan, -torch.inf, 1e-9])
PAIRS = A[:, None], A[None]
ALIKE = torch.broadcast_tensors(*PAIRS) if OLDER else PAIRS  # with equal_nan PyTorch's own did not broadcast
ARGUMENTS = {
    aten.isclose.default: [
        PAIRS, (*ALIKE, 0.5, 0.1, True), (torch.arange(3), torch.arange(3) * 2),
    ],
    aten.hstack.default: [([A, A],), ([A[0], A[1]],), ([A.view(2, 3), A.view(2, 3)],), ([A.view(1, 2, 3)] * 2,)],
    aten.column_stack.default: [([A, A.view(6, 1)],), ([A[0], A[1]],)],
    aten.fliplr.default: [(A.view(2, 3),)],
    aten.tensordot.default: [
        (B, B, [0], [0]), (B, B, [1, 0], [1, 0]), (B, B, [], []), (B, B[:1], [0], [0]), (B[:, :1], B.T, [-1], [0]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("op", OTHER_NAMES, ids=str)
def test_they_are_what_they_stand_for(op):
    words = torch.arange(6), torch.arange(6).flip(0) * 3
    scalar = (words[0], 5)
    for given in ARGUMENTS.get(op, [scalar if op._overloadname == "Scalar" else words]):
        expected, found = (call(*_copied(given)) for call in (op, OTHER_NAMES[op]))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def _copied(given):
    return [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
