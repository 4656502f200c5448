"""The tables of ``lowering.slots``: what is said to keep rows apart does, what is said to move ids does only that."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from joestar.lowering import slot_rules

ROWS, WIDTH = 7, 5
aten = torch.ops.aten


def table():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4))
APART = [
    lambda x: x.relu() * 2 + 1, lambda x: x * WEIGHT[0], lambda x: x + WEIGHT[:1], lambda x: torch.where(x > 0, x, -x),
    lambda x: x.view(ROWS, -1, 1), lambda x: x.reshape(ROWS, WIDTH, 1),
    lambda x: aten._unsafe_view(x, [ROWS, WIDTH, 1]),
    lambda x: x[:, :, None].flatten(1), lambda x: x.unflatten(1, (1, WIDTH)), lambda x: x[:, :1].squeeze(1),
    lambda x: F.one_hot(x.argmax(1), WIDTH), lambda x: x.unsqueeze(-1), lambda x: x[:, 1:3], lambda x: x[:],
    lambda x: x.select(1, 2), lambda x: x.narrow(1, 1, 2), lambda x: x[:, :1].expand(ROWS, 3),
    lambda x: x[:, :1].expand_as(x), lambda x: x[:, :, None].permute(0, 2, 1), lambda x: x[:, :, None].transpose(1, 2),
    lambda x: x.flip(1), lambda x: torch.cat([x, x * 2], 1), lambda x: torch.concat([x, x], -1),
    lambda x: torch.stack([x, x], 1), lambda x: F.linear(x, WEIGHT), lambda x: x @ WEIGHT, lambda x: x.mm(WEIGHT),
    lambda x: x.sum(1), lambda x: x.mean(-1, keepdim=True), lambda x: x.amax(1), lambda x: x.amin(1),
    lambda x: x.argmax(1), lambda x: x.argmin(1), lambda x: (x > 0).any(1), lambda x: (x > 0).all(1),
    lambda x: x.cumsum(1), lambda x: x.logsumexp(1), lambda x: x.softmax(1), lambda x: aten._softmax(x, 1, False),
    lambda x: x.log_softmax(-1), lambda x: aten._log_softmax(x, 1, False), lambda x: x.std(1), lambda x: x.var(1),
    lambda x: aten.norm(x, 2, [1]), lambda x: torch.linalg.vector_norm(x, dim=1), lambda x: F.normalize(x),
    lambda x: F.layer_norm(x, (WIDTH,)), lambda x: F.rms_norm(x, (WIDTH,)), lambda x: x.double().clone().detach(),
    lambda x: torch.zeros_like(x) + x,
]  # fmt: skip
TOGETHER = [
    lambda x: x - x.mean(0), lambda x: x.sum((0, 1)), lambda x: x.t() @ x, lambda x: x.flip(0), lambda x: x[1:],
    lambda x: x[3], lambda x: x.softmax(0), lambda x: x.cumsum(0), lambda x: x * torch.arange(ROWS)[:, None],
    lambda x: x + torch.randn(ROWS, 1), lambda x: F.dropout(x, 0.5), lambda x: x.roll(1, 0),
    lambda x: x.view(WIDTH, ROWS),
    lambda x: x.reshape(-1), lambda x: x.transpose(0, 1), lambda x: x.sort(0).values, lambda x: x.argsort(0),
    lambda x: torch.cat([x, x]), lambda x: x.repeat(2, 1), lambda x: x @ x.t(),
    lambda x: F.layer_norm(x, (ROWS, WIDTH)),
    lambda x: x.permute(1, 0), lambda x: x.var(0), lambda x: x.norm(), lambda x: x.std(), lambda x: x.sum(),
    lambda x: x[::2], lambda x: x.sum(1) + WEIGHT[0, 0] * torch.linspace(0, 1, ROWS), lambda x: x.bernoulli(0.5),
    lambda x: x[None].expand(ROWS, ROWS, WIDTH), lambda x: torch.add(x[:, 0], x), lambda x: x.unsqueeze(0),
    lambda x: x[:, 0] + x[:, :1],
]  # fmt: skip
"""Things that mix rows, or would have rows elsewhere. (``x[:, 0] + x[:, :1]`` has ``[7, 7]``.)"""


def followed(function):
    """(whether the result is said to be row by row, packets of the ops that were said to be so)."""
    gm = make_fx(function, pre_dispatch=True)(table())
    tables, seen = set(gm.graph.find_nodes(op="placeholder")), set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not any(arg in tables for arg in node.all_input_nodes):
            continue
        mine = {arg for arg in node.all_input_nodes if arg in tables}
        if not slot_rules.row_by_row(node, mine):
            return False, seen
        tables.add(node)
        seen.add(slot_rules.packet(node))
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0] in tables, seen


def test_what_is_said_to_keep_rows_apart_does():
    order, covered = torch.randperm(ROWS), set()
    for number, function in enumerate(APART):
        apart, seen = followed(function)
        assert apart, number
        covered |= seen
        assert torch.allclose(function(table()[order]), function(table())[order]), number
    composite = {aten.native_layer_norm, aten.concat, aten.mm}  # what a trace has another op for
    assert slot_rules._ROW_RULES.keys() <= covered | composite, slot_rules._ROW_RULES.keys() - covered


@pytest.mark.parametrize("function", TOGETHER, ids=lambda f: f.__code__.co_firstlineno)
def test_what_mixes_rows_is_not_said_to_keep_them_apart(function):
    try:
        apart, _ = followed(function)
    except RuntimeError:  # no such sizes
        return
    assert not apart


MOVES = [
    lambda i: i.view(2, -1), lambda i: i.reshape(-1, 1), lambda i: aten._unsafe_view(i, [2, 3]), lambda i: i[1:4],
    lambda i: i.select(0, 2), lambda i: i.unsqueeze(1), lambda i: i.unsqueeze(1).squeeze(1),
    lambda i: i[None].expand(2, 6),
    lambda i: i.view(2, 3).flatten(), lambda i: i.unflatten(0, (2, 3)), lambda i: i.view(2, 3).permute(1, 0),
    lambda i: i.view(2, 3).transpose(0, 1), lambda i: i.view(2, 3).t(), lambda i: i.flip(0), lambda i: i.roll(2),
    lambda i: i.narrow(0, 1, 3), lambda i: i.repeat(2), lambda i: i.repeat_interleave(2),
    lambda i: i.clone().contiguous(),
    lambda i: i.detach(), lambda i: i.long(), lambda i: i.int(), lambda i: i.split(2)[1], lambda i: i.chunk(2)[0],
    lambda i: i.unbind()[3], lambda i: i.split_with_sizes([2, 4])[1],
]  # fmt: skip


def test_what_is_said_to_move_ids_only_moves_them():
    ids = torch.tensor([4, 1, 7, 0, 3, 9])
    numbers = torch.tensor([5, 2, 8, 11, 40, 3, 6, 70, 1, 9])
    for place, function in enumerate(MOVES):
        gm = make_fx(function, pre_dispatch=True)(ids)
        for node in gm.graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                assert slot_rules.moves(node), (place, node.target)
        assert torch.equal(numbers[function(ids).long()], function(numbers[ids]).long()), place


def test_what_computes_with_ids_is_not_said_to_move_them():
    for function in (lambda i: i.float(), lambda i: i % 2, lambda i: i.sort()[0], lambda i: i.to(torch.int16),
                     lambda i: i.bool(), lambda i: torch.repeat_interleave(i)):  # fmt: skip
        gm = make_fx(function, pre_dispatch=True)(torch.tensor([4, 1, 7]))
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
        assert not all(map(slot_rules.moves, nodes))
