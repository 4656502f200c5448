"""Keyed dropout: the mask is a function of (seed, epoch, step, site, row id, column) and of nothing else."""

import math

import pytest
import torch

from . import oracle
from .database import FLOATS, KEY, values

ops = torch.ops.joestar
ROWS, COLUMNS = 300, 33


def _mask(ids, key=KEY, site=0, p=0.5, columns=COLUMNS):
    """Where dropout keeps ones."""
    return ops.keyed_dropout(torch.ones(ids.numel(), columns), ids, key, site, p) != 0


def _same_share(a, b, p):
    """Whether two masks look independent: they agree as often as coin flips of their rate would, within 5 sigma."""
    chance = p * p + (1 - p) * (1 - p)
    sigma = math.sqrt(chance * (1 - chance) / a.numel())
    return abs((a == b).double().mean().item() - chance) < 5 * sigma


def test_mask_is_the_published_hash():
    ids, x = torch.tensor([3, 0, 2**31 + 5, 3]), values((4, 2, 3), torch.float64, 1)
    for key, site, p in ((KEY, 0, 0.3), (torch.tensor([-5, 1, 2**33]), 9, 0.75)):
        out = ops.keyed_dropout(x, ids, key, site, p)
        state = oracle.key_state(*key.tolist(), site + oracle.DROPOUT_SITE)
        for row, node in enumerate(ids.tolist()):
            for column in range(6):
                keeps = oracle.keeps(oracle.row_state(state, node), column, 6, p)
                expected = x[row].flatten()[column] * (1 / (1 - p)) if keeps else 0.0
                assert out[row].flatten()[column] == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.25, 0.5])
def test_kept_values_are_scaled_in_the_dtype_of_x(dtype, p):
    x, ids = values((ROWS, 4), dtype, 1), torch.arange(ROWS)
    out, keep = ops.keyed_dropout(x, ids, KEY, 0, p), _mask(ids, p=p, columns=4)
    assert out.dtype == dtype
    assert torch.equal(out, torch.where(keep, x * (1 / (1 - p)), torch.zeros((), dtype=dtype)))
    assert p or torch.equal(out, x)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_mask_follows_the_row_wherever_it_is(ids_dtype):
    ids = (torch.arange(ROWS) * 7919 % 100_003).to(ids_dtype)
    x = values((ROWS, COLUMNS), torch.float32, 1)
    whole = ops.keyed_dropout(x, ids, KEY, 2, 0.5)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.keyed_dropout(x[order], ids[order], KEY, 2, 0.5), whole[order])
    padded = ops.keyed_dropout(torch.cat([x, x[:9]]), torch.cat([ids, ids[:1].expand(9)]), KEY, 2, 0.5)
    assert torch.equal(padded[:ROWS], whole)
    assert torch.equal(ops.keyed_dropout(x[:5], ids[:5], KEY, 2, 0.5), whole[:5])
    assert torch.equal(ops.keyed_dropout(x.reshape(ROWS, 3, 11), ids, KEY, 2, 0.5).flatten(1), whole)
    assert ops.keyed_dropout(x[:0], ids[:0], KEY, 2, 0.5).shape == (0, COLUMNS)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_drop_rate(p):
    mask = _mask(torch.arange(2000), p=p)
    sigma = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(1 - mask.double().mean().item() - p) < 4 * sigma
    for dim, size in ((0, 2000), (1, COLUMNS)):  # and in every row and column (a wider bound: there are many of them)
        rates = 1 - mask.double().mean(dim)
        assert (rates - p).abs().max() < 6 * math.sqrt(max(p * (1 - p), 0.03) / size) + 0.02


def test_every_word_of_the_key_matters():
    ids = torch.arange(ROWS)
    base = _mask(ids)
    assert torch.equal(base, _mask(ids))
    others = [_mask(ids, key=KEY + torch.tensor(change)) for change in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    others += [_mask(ids, key=KEY + torch.tensor(change)) for change in ([2**32, 0, 0], [0, 0, 2**32])]
    others += [_mask(ids, site=1), _mask(ids, site=2), _mask(ids + 1), _mask(ids + 2**32)]
    others += [base.roll(1, 1), base.roll(1, 0)]
    for other in others:
        assert _same_share(base, other, 0.5)


def test_gradient_is_the_scaled_mask():
    ids = torch.arange(ROWS)
    x = values((ROWS, COLUMNS), torch.float64, 1).requires_grad_()
    out = ops.keyed_dropout(x, ids, KEY, 1, 0.25)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, _mask(ids, site=1, p=0.25).double() * (1 / 0.75))


# --- edges ----------------------------------------------------------------------------------------------------------

INDPTR = torch.tensor([0, 3, 3, 7, 8, 40])
DSTS = torch.tensor([12, 4, 90_000, 7, 5])


def _edges(x, indptr=INDPTR, dsts=DSTS, key=KEY, site=0, p=0.5):
    return ops.keyed_edge_dropout(x, indptr, dsts, key, site, p)


def test_edge_mask_is_keyed_by_destination_and_rank():
    x = values((40, 2), torch.float64, 1)
    out = _edges(x, site=4, p=0.3)
    state = oracle.key_state(*KEY.tolist(), 4 + oracle.DROPOUT_SITE)
    for row, node in enumerate(DSTS.tolist()):
        start, end = INDPTR[row : row + 2].tolist()
        for rank, edge in enumerate(range(start, end)):
            for head in range(2):
                keeps = oracle.keeps(oracle.absorb(oracle.row_state(state, node), rank), head, 2, 0.3)
                assert out[edge, head] == (x[edge, head] * (1 / 0.7) if keeps else 0)


def test_edge_mask_does_not_depend_on_order_or_padding():
    x = values((40, 3), torch.float32, 1)
    whole = _edges(x)
    assert 0 < (whole == 0).double().mean() < 1
    degrees, order = INDPTR.diff(), torch.tensor([4, 2, 0, 3, 1])
    moved = torch.cat([torch.arange(int(INDPTR[row]), int(INDPTR[row + 1])) for row in order])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(degrees[order], 0)])
    assert torch.equal(_edges(x[moved], offsets, DSTS[order]), whole[moved])
    padded = _edges(
        torch.cat([x, x[:6]]), torch.cat([INDPTR, INDPTR[-1:].expand(3)]), torch.cat([DSTS, DSTS[:1].expand(3)])
    )
    assert torch.equal(padded[:40], whole)
    assert torch.equal(_edges(x[:, 0]), _edges(x[:, :1])[:, 0])
    assert torch.equal(_edges(x, dsts=DSTS.int()), whole)


def test_edge_drop_rate_sites_and_gradient():
    indptr, dsts = torch.arange(0, 20_001, 5), torch.arange(4000)
    x = torch.ones(20_000, 3, dtype=torch.float64, requires_grad=True)
    for p in (0.1, 0.6):
        out = _edges(x, indptr, dsts, p=p)
        sigma = math.sqrt(p * (1 - p) / x.numel())
        assert abs((out == 0).double().mean().item() - p) < 4 * sigma
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, (out != 0).double() * (1 / (1 - p)))
    base = _edges(x, indptr, dsts) != 0
    step = KEY + torch.tensor([0, 0, 1])
    for other in (_edges(x, indptr, dsts, site=1), _edges(x, indptr, dsts, key=step), base.roll(1, 0), base.roll(1, 1)):
        assert _same_share(base, other != 0, 0.5)
    nodes = ops.keyed_dropout(x, torch.arange(20_000), KEY, 0, 0.5) != 0
    assert _same_share(base, nodes, 0.5)


# --- compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_masks_are_the_eager_ones(backend):
    def function(x, ids, e, indptr, dsts, key):
        nodes = ops.keyed_dropout(x, ids, key, 3, 0.5)
        edges = ops.keyed_edge_dropout(e, indptr, dsts, key, 4, 0.25)
        return nodes, edges

    # A low threshold keeps Inductor from inlining the hash into ever longer expressions: seconds instead of a minute.
    options = {"realize_opcount_threshold": 8} if backend == "inductor" else None
    compiled = torch.compile(function, backend=backend, dynamic=False, options=options)
    x, e = values((64, 5), torch.float32, 1), values((40, 2), torch.float32, 2)
    ids = torch.arange(64, dtype=torch.int32) * 1_000_003
    for key in (KEY, torch.tensor([-(2**50), 7, 2**35 + 3])):
        arguments = (x, ids, e, INDPTR, DSTS, key)
        for ours, expected in zip(compiled(*arguments), function(*arguments), strict=True):
            assert torch.equal(ours, expected)


def test_gradients_through_a_compiled_graph_use_the_same_mask():
    x, ids = values((64, 5), torch.float32, 1).requires_grad_(), torch.arange(64)
    compiled = torch.compile(ops.keyed_dropout, backend="aot_eager", dynamic=False)
    out = compiled(x, ids, KEY, 3, 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, (ops.keyed_dropout(x, ids, KEY, 3, 0.5) != 0) * 2.0)
