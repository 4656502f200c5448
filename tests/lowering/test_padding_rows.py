"""Ops that treat every row on its own, lookups, guards against NaN in padded rows: padded equals exact and eager."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar import fn

from .harness import WIDTH, assert_refused, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")

TABLE = nn.Embedding(WIDTH, WIDTH)


def degree(block):
    """In-degree of the destinations: at least 1 in true rows (no node is isolated), 0 in padded ones."""
    return block.in_degrees()


def pulled(f, reduce: str = "mean"):
    """``f`` of an aggregate, which is 0 in padded rows, through a matrix product: there NaN would reach a weight."""

    def operation(m, b, h):
        return h + (f(b, b.pull(fn.copy_u(h), reduce)) @ m.first.weight).sum()

    return operation


def best(h):
    return h.detach().topk(3)[1]


def test_columns_of_rows():
    """Scatters, bags of embeddings and pooling along columns: every row on its own."""
    check_rows({
        "scatter": lambda m, b, h: torch.zeros_like(h).scatter(1, best(h), h[:, :3]),
        "scatter of a number": lambda m, b, h: h * torch.zeros_like(h).scatter_(1, best(h), 1.0),
        "index_copy": lambda m, b, h: torch.zeros_like(h).index_copy(1, torch.tensor([2, 0, 5]), h[:, :3]),
        "take_along_dim": lambda m, b, h: torch.take_along_dim(h, h.argsort(1), 1),
        "take_along_dim, a method": lambda m, b, h: h * h.take_along_dim(torch.tensor([[1]]), dim=-1).sum(1)[:, None],
        "scatter_reduce": lambda m, b, h: h.scatter_reduce(1, best(h), h[:, :3], "amax"),
        "scatter of destinations": lambda m, b, h: h + (
            lambda d: torch.zeros_like(d).scatter(1, best(d), d[:, :3]).sum(0))(h[: b.num_dst]),
        "bag": lambda m, b, h: h + F.embedding_bag(best(h), m.table.weight, mode="mean"),
        "largest of a bag": lambda m, b, h: h + F.embedding_bag(best(h), m.table.weight, mode="max"),
        "weighted bag": lambda m, b, h: F.embedding_bag(
            best(h), m.table.weight, mode="sum", per_sample_weights=h[:, :3].contiguous()),
        "bag of a computed index": lambda m, b, h: h + F.embedding_bag(
            (degree(b) - 1)[:, None].expand(-1, 2), m.table.weight).sum(0),
        "avg_pool1d": lambda m, b, h: h + F.avg_pool1d(h, 2).repeat(1, 2),
        "max_pool1d": lambda m, b, h: h + F.max_pool1d(h.view(-1, 2, 4), 2).reshape(-1, 4).repeat(1, 2),
        "adaptive": lambda m, b, h: h + F.adaptive_avg_pool1d(h, 4).repeat(1, 2),
        "adaptive largest": lambda m, b, h: h + F.adaptive_max_pool1d(h[:, None], 4)[:, 0].repeat(1, 2),
        "lp_pool1d": lambda m, b, h: h + F.lp_pool1d(h[:, None], 2, 2)[:, 0].repeat(1, 2),
    }, table=TABLE)  # fmt: skip


def test_refused_columns_of_rows():
    assert_refused({
        "index_copy of rows": (
            lambda m, b, h: torch.zeros_like(h).index_copy(0, torch.arange(h.shape[0]), h), "writes rows at computed",
        ),
        "scatter of rows": (lambda m, b, h: h.scatter(0, (h * 0).long(), h), "scatters along padded rows"),
        "pool of rows": (lambda m, b, h: h + F.avg_pool1d(h.t(), 2).sum(), "moves a window over padded rows"),
        "into another set": (
            lambda m, b, h: h.scatter(1, best(h[: b.num_dst]), h[: b.num_dst]), "rows of one set into those of another"
        ),
        "products": (
            lambda m, b, h: h.scatter_reduce(1, best(h), h[:, :3], "prod"), "scatters along columns of padded rows"
        ),
    }, "test_padding_rows.py")  # fmt: skip


def test_rowwise():
    check_rows({
        "relu": lambda m, b, h: h.relu(),
        "heads": lambda m, b, h: h.view(-1, 2, 4).softmax(-1).reshape(-1, WIDTH),
        "flat": lambda m, b, h: h + h.flatten().sum(),
        "pairs of columns": lambda m, b, h: h.reshape(-1, 4).relu().view(h.shape),
        "cat": lambda m, b, h: torch.cat([h, h.relu()], 1)[:, 4:12],
        "stack": lambda m, b, h: torch.stack([h, h.relu()], 0).mean(0),
        "stack last": lambda m, b, h: torch.stack([h, h.relu()], -1).max(-1)[0],
        "repeat": lambda m, b, h: h.repeat(1, 2)[:, 3:11] + h.repeat(2, 1, 1).sum(0),
        "split": lambda m, b, h: torch.cat(h.split(4, 1)[::-1], 1),
        "chunk": lambda m, b, h: torch.cat(h.chunk(2, -1)[::-1], 1),
        "unbind": lambda m, b, h: h + h.unbind(1)[2][:, None],
        "glu": lambda m, b, h: F.glu(torch.cat([h, h], 1)),
        "roll, flip": lambda m, b, h: h.roll(1, 1) + h.flip(1),
        "sort, topk": lambda m, b, h: h.sort()[0] + h.topk(3)[0].sum(1, keepdim=True),
        "median, var_mean": lambda m, b, h: h - h.median(1)[0][:, None] - torch.var_mean(h, 1)[1][:, None],
        "squeeze": lambda m, b, h: h[:, None].squeeze() * h.mean(1, keepdim=True).squeeze()[:, None],
        "permute": lambda m, b, h: h.view(-1, 2, 4).permute(1, 0, 2).transpose(0, 1).reshape(-1, WIDTH),
        "pad": lambda m, b, h: F.pad(h, (0, 2))[:, :WIDTH],
        "cumsum": lambda m, b, h: h.cumsum(0),
        "expand": lambda m, b, h: h + h.mean(1, keepdim=True).expand(b.num_src, WIDTH),
    })  # fmt: skip


def test_norms_of_rows():
    check_rows({
        "layer_norm": lambda m, b, h: F.layer_norm(h, (WIDTH,)),
        "rms_norm": lambda m, b, h: F.rms_norm(h, (WIDTH,)),
        "group_norm": lambda m, b, h: F.group_norm(h, 2),
        "normalize": lambda m, b, h: F.normalize(h),
        "log_softmax": lambda m, b, h: h * h.log_softmax(1),
        "cosine": lambda m, b, h: h * F.cosine_similarity(h, h.relu())[:, None],
        "distance": lambda m, b, h: h * F.pairwise_distance(h, h.relu())[:, None],
        "bilinear": lambda m, b, h: F.bilinear(h, h, m.cube),
        "outer": lambda m, b, h: h + torch.outer(h[:, 0], h[:, 1]).sum(1, keepdim=True),
        "conv1d": lambda m, b, h: h + F.conv1d(h[:, None], m.cube[:1, :1, :3]).sum((1, 2))[:, None],
        "attention in rows": lambda m, b, h: F.scaled_dot_product_attention(*[h.view(-1, 2, 4)] * 3).reshape(-1, WIDTH),
        "searchsorted": lambda m, b, h: h + torch.searchsorted(m.cube[0, 0].detach().sort()[0], h.detach()),
    }, cube=nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH)))  # fmt: skip


@pytest.mark.parametrize("eps", [0.0, 1e-300, 1e-5])
def test_norms_of_aggregates(eps):
    """Which are rows of zeros in the padding: without an ``eps``, 0 / 0."""
    check_rows({
        "layer_norm": pulled(lambda b, y: F.layer_norm(y, (WIDTH,), eps=eps)),
        "rms_norm": pulled(lambda b, y: F.rms_norm(y, (WIDTH,), eps=eps)),
        "group_norm": pulled(lambda b, y: F.group_norm(y, 2, eps=eps)),
        "group_norm of planes": pulled(lambda b, y: F.group_norm(y.view(-1, 2, 4), 2, eps=eps).flatten(1)),
    })  # fmt: skip


def test_diagonals_and_what_goes_along_columns():
    check_rows({
        "diag": lambda m, b, h: h + torch.diag(h @ h.T)[:, None].tanh(),
        "diagonal": lambda m, b, h: h * (h @ h.T).diagonal()[:, None].tanh(),
        "diag of a vector": lambda m, b, h: h + torch.diag(h[:, 0].tanh()) @ h,
        "diagonals of planes": lambda m, b, h: h + h.view(-1, 2, 2, 2).diagonal(1, 1, 2).sum((1, 2))[:, None],
        "diag_embed": lambda m, b, h: (torch.diag_embed(h, 1)[:, :-1, 1:] * h[:, :, None]).sum(1),
        "repeat_interleave": lambda m, b, h: h.repeat_interleave(2, dim=1)[:, :WIDTH],
        "unfold": lambda m, b, h: h + h.unfold(1, 3, 2).sum((1, 2))[:, None],
        "isin": lambda m, b, h: h * torch.isin(b.srcs, torch.arange(0, 48, 3, dtype=b.srcs.dtype))[:, None],
        "tensordot": lambda m, b, h: torch.tensordot(h, m.cube[0], dims=([1], [1])),
        "tensordot of two": lambda m, b, h: torch.tensordot(h.view(-1, 2, 4), m.cube.view(4, 2, -1), ([1, 2], [1, 0]))
                                            .mean(1, keepdim=True) + h,
        "tensordot of rows": lambda m, b, h: h @ torch.tensordot(h, h, dims=([0], [0])).tanh(),
        "tensordot of one": lambda m, b, h: h + torch.tensordot(h.sum(1, keepdim=True), m.cube[0], ([1], [0])),
        "tensordot with one": lambda m, b, h: h * torch.tensordot(h, m.cube[:1, 0], ([1], [0])).tanh(),
        "tensordot of nothing": lambda m, b, h: h + torch.tensordot(h, m.cube[0, 0], 0).sum(2),
    }, cube=nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH)))  # fmt: skip


def test_recurrence_in_rows():
    check_rows({
        "lstm": lambda m, b, h: m.lstm(h.view(-1, 2, 4))[0].reshape(-1, WIDTH),
        "lstm, sequence first": lambda m, b, h: m.first_lstm(h.view(-1, 2, 4).transpose(0, 1))[0][1].repeat(1, 2),
        "gru": lambda m, b, h: m.gru(h.view(-1, 2, 4))[0].reshape(-1, WIDTH),
        "cell": lambda m, b, h: m.cell(h, h),
    }, lstm=nn.LSTM(4, 2, bidirectional=True, batch_first=True), first_lstm=nn.LSTM(4, 4),
        gru=nn.GRU(4, 4, batch_first=True), cell=nn.GRUCell(WIDTH, WIDTH))  # fmt: skip


def test_lookups():
    """``degree - 1`` is -1 in padded rows, ``arange`` goes up to the bound: neither may be looked up as it is."""
    check_rows({
        "embedding": lambda m, b, h: h + m.table(degree(b) - 1).sum(),
        "index_select": lambda m, b, h: h + m.table.weight.index_select(0, degree(b) - 1).sum(),
        "index": lambda m, b, h: h + m.table.weight[degree(b) - 1].sum(),
        "gather": lambda m, b, h: h + h[: b.num_dst].gather(1, degree(b)[:, None] - 1).sum(),
        "one_hot": lambda m, b, h: h + F.one_hot(degree(b) - 1, WIDTH).sum(0),
        "positions": lambda m, b, h: h + m.table.weight.repeat(9, 1)[torch.arange(b.num_src)],
        "graph degrees": lambda m, b, h: h + m.table(b.graph_degrees("src").clamp(max=7)),
        "edges": lambda m, b, h: h + h[b.indices].sum(0),
        "from the end": lambda m, b, h: h + h[torch.tensor([-1, -2])].sum(0),
        "computed, from the end": lambda m, b, h: h + h[torch.arange(b.num_dst) - 1].sum(0),
        "pairs": lambda m, b, h: h + h[torch.tensor([-1, 0]), torch.tensor([-1, 2])].sum(),
        "index_add": lambda m, b, h: h + zeros().index_add(0, b.graph_degrees("src") % 8, h).sum(0),
        "scatter_add": lambda m, b, h: h + zeros().scatter_add(0, buckets(b).expand(-1, 8), h).sum(0),
        **{f"scatter_reduce {how}, {include}": lambda m, b, h, how=how, include=include: h + (zeros() + 0.5)
           .scatter_reduce(0, buckets(b).expand(-1, 8), h, how, include_self=include).sum(0)
           for how in ("sum", "mean", "amax", "amin", "prod") for include in (True, False)},
    }, table=TABLE)  # fmt: skip


def zeros() -> torch.Tensor:
    """A small table to scatter into."""
    return torch.zeros(WIDTH, WIDTH, dtype=torch.float64)


def buckets(block) -> torch.Tensor:
    """An index ``[num_src, 1]`` below 8."""
    return (block.graph_degrees("src") % 8)[:, None]


def test_guards():
    """Without a guard each of these is NaN or infinite in padded rows, or has such a gradient."""
    check_rows({
        "x / degree": pulled(lambda b, a: a / degree(b)[:, None], "sum"),
        "x / 0": pulled(lambda b, a: a / a.abs().sum(1, keepdim=True)),
        "12 // degree": pulled(lambda b, a: a * (12 // degree(b) + 12 % degree(b))[:, None]),
        "degree ** -0.5": pulled(lambda b, a: a * degree(b).double().pow(-0.5)[:, None]),
        "rsqrt": pulled(lambda b, a: a * a.var(1, keepdim=True).rsqrt()),
        "std of a row": pulled(lambda b, a: a / a.std(1, keepdim=True)),
        "norm of a row": pulled(lambda b, a: a / a.norm(dim=1, keepdim=True)),
        "log": pulled(lambda b, a: a.abs().log()),
        "sqrt": pulled(lambda b, a: a.abs().sqrt() + a.abs() ** 0.3),
        "acos": pulled(lambda b, a: a.tanh().acos() + (a.tanh() * 0.9).atanh()),
        "logit": pulled(lambda b, a: torch.logit(a.sigmoid() * (degree(b) > 0)[:, None])),
        "acosh": pulled(lambda b, a: (a.abs() + 1).acosh()),
        "atan2": pulled(lambda b, a: torch.atan2(a, a.exp() * a) + torch.hypot(a, a)),
        "entr": pulled(lambda b, a: torch.special.entr(a.abs()) + torch.xlogy(a, a.abs())),
        "addcdiv": pulled(lambda b, a: torch.addcdiv(a, a, a)),
        "lgamma": pulled(lambda b, a: torch.lgamma(a.abs())),
        "masked softmax": pulled(lambda b, a: a.masked_fill((degree(b) == 0)[:, None], -math.inf).softmax(1)),
        "masked log_softmax": pulled(lambda b, a: a.masked_fill((degree(b) == 0)[:, None], -math.inf).log_softmax(1)),
        "masked logsumexp": pulled(
            lambda b, a: a + a.masked_fill((degree(b) == 0)[:, None], -math.inf).logsumexp(1, keepdim=True)
        ),
        "both sides": lambda m, b, h: h + (h @ h.T).relu().add(1e-3).log().mean(1, keepdim=True),
    })  # fmt: skip


def test_no_guard_where_it_is_not_needed():
    """Factors that are small in padded rows, or shared by all rows, cannot make a product overflow."""
    case = check_rows({
        "constant": lambda m, b, h: h / 3 + h * m.first.bias,
        "gate": lambda m, b, h: h * h.sigmoid(),
        "mask": lambda m, b, h: h * (h > 0),
        "degrees": lambda m, b, h: h * b.graph_degrees("src").clamp(min=1).double().pow(-0.5).masked_fill(
            b.graph_degrees("src") == 0, 0)[:, None],
        "aggregates": lambda m, b, h: h + (b.pull(fn.copy_u(h), "mean") * b.in_degrees()[:, None]).sum(0),
    })  # fmt: skip
    assert case.program.padded.rewrites["guard"] == 1  # of the power


def test_refused_rows():
    assert_refused({
        "cat rows": (lambda m, b, h: torch.cat([h, h], 0).sum(0) + h, "joins sets of padded rows end to end"),
        "stride": (lambda m, b, h: h[::2].sum(0) + h, "cuts padded rows"),
        "all but the first": (lambda m, b, h: h[1:].sum(0) + h, "cuts padded rows"),
        "first row": (lambda m, b, h: h[0] + h, "picks a single padded row"),
        "last row": (lambda m, b, h: h[-1] + h, "picks a single padded row"),
        "transposed": (lambda m, b, h: h.t().reshape(-1).sum() + h, "which interleaves padded rows"),
        "square flattened": (lambda m, b, h: (h @ h.T).reshape(-1).sum() + h, "which interleaves padded rows"),
        "repeat rows": (lambda m, b, h: h.repeat(2, 1).sum(0) + h, "repeats padded rows"),
        "tile": (lambda m, b, h: torch.tile(h, (2, 1)).sum(0) + h, "repeats padded rows"),
        "flip rows": (lambda m, b, h: h.flip(0).cumsum(0), "moves padded rows in front"),
        "roll rows": (lambda m, b, h: h.roll(1, 0), "moves padded rows in front"),
        "roll all": (lambda m, b, h: h.roll(1), "moves padded rows in front"),
        "pad rows": (lambda m, b, h: F.pad(h, (0, 0, 1, 0)).sum(0) + h, "adds entries around padded rows"),
        "beside the diagonal": (lambda m, b, h: h + (h @ h.T).diagonal(1).sum(), "takes a diagonal beside"),
        "repeat_interleave rows": (lambda m, b, h: h.repeat_interleave(2, 0).sum(0) + h, "works along padded rows"),
        "unfold rows": (lambda m, b, h: h.unfold(0, 2, 2).sum((0, 2)) + h, "works along padded rows"),
        "isin rows": (lambda m, b, h: h * torch.isin(b.srcs, b.dsts)[:, None], "looks among padded rows"),
        "reversed": (lambda m, b, h: h[torch.arange(b.num_src - 1, -1, -1)], "counts from the end"),
        "unknown": (lambda m, b, h: h + h.take(torch.tensor([0])), "has no rule for padded rows"),
        "scatter": (lambda m, b, h: zeros().scatter(0, buckets(b).expand(-1, 8), h).sum(0) + h,
                    "scatters along padded rows"),
        "place in a square": (
            lambda m, b, h: h * (1 + torch.div((h @ h.T).argmax(), b.num_src, rounding_mode="floor")),
            "counts entries of rows that are padded",
        ),
        "place in columns": (lambda m, b, h: h * (1 + h.t().argmin()), "counts entries of rows that are padded"),
        "cosine of one row": (
            lambda m, b, h: h + F.cosine_similarity(h.mean(0, keepdim=True), h, dim=0), "works along a dimension",
        ),
        "cosines of columns": (
            lambda m, b, h: h + F.cosine_embedding_loss(
                h.t(), h.t().tanh(), torch.ones(h.shape[1], dtype=h.dtype), reduction="none"),
            "takes padded rows for columns",
        ),
        "rows behind nothing": (
            lambda m, b, h: h + torch.cat([torch.empty(0, dtype=h.dtype), h.t(), h.t()], 1).sum(),
            "joins sets of padded",
        ),
        "bags that are cut anywhere": (
            lambda m, b, h: h + F.embedding_bag(buckets(b)[:, 0], m.table.weight, b.indptr[:-1].long() * 0).sum(0),
            "has bags that its offsets cut",
        ),
        "scatter_add of fewer rows": (
            lambda m, b, h: h + zeros().scatter_add(0, buckets(b)[: b.num_dst].expand(-1, 8), h.detach()).sum(0),
            "has an index of other rows than its source",
        ),
        "scatter_reduce of fewer rows": (
            lambda m, b, h: h + zeros().scatter_reduce(
                0, buckets(b)[: b.num_dst].expand(-1, 8), h.detach(), "amax").sum(0),
            "has an index of other rows than its source",
        ),
        "layer_norm over nodes": (lambda m, b, h: F.layer_norm(h, h.shape), "normalises over padded rows"),
        "group_norm over nodes": (lambda m, b, h: F.group_norm(h.t()[None], 2)[0].t(), "works across padded rows"),
        "attention over nodes": (lambda m, b, h: F.scaled_dot_product_attention(*[h[None]] * 3)[0], "attends to"),
        "cosine of columns": (lambda m, b, h: h * F.cosine_similarity(h, h.relu(), dim=0), "works along a dimension"),
        "gradient by frequency": (
            lambda m, b, h: h + F.embedding(buckets(b)[:, 0], m.table.weight, scale_grad_by_freq=True),
            "scales gradients by counts",
        ),
    }, "test_padding_rows.py", table=TABLE)  # fmt: skip
