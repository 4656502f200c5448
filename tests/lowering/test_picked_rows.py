"""Rows picked by a mask (``out[mask]``, ``mask.nonzero()``): values and gradients are those of plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar import fn
from joestar.errors import CaptureError, LabelError
from tests.runtime.common import FEATURES, make_step, planted_graph
from tests.runtime.plain import plain_epoch

pytestmark = [pytest.mark.usefixtures("cheapest_captures"), pytest.mark.every(3)]

IDX = torch.arange(600)


def known(out, y):
    mask = y >= 0
    return F.cross_entropy(out[mask], y[mask])


def weighted(out, y):
    mask = y != -1
    weight = torch.arange(1.0, 5.0, dtype=out.dtype)
    return F.cross_entropy(out[mask], y[mask], weight=weight, label_smoothing=0.1)


def likelihood(out, y):
    mask = y > 0
    return F.nll_loss(out.log_softmax(1)[mask,], y[mask,] - 1, reduction="sum") / mask.sum()


def entries(out, y):
    target = F.one_hot(y.clamp(min=0), 4).to(out.dtype)
    mask = (target > 0) | (out > 0.1)
    return F.binary_cross_entropy_with_logits(out[mask], target[mask])


def confident(out, y):
    """Pseudo labels: a mask of what the model gives, none at all perhaps."""
    p = out.softmax(1)
    mask = (p.amax(1) > 0.27) & (y < 0)
    return F.cross_entropy(out, y.clamp(min=0)) + F.cross_entropy(out[mask], p.argmax(1)[mask], reduction="sum")


def of_parts(out, y):
    """Several masks; sizes as numbers; a mean over columns beside one over rows."""
    some, others = out[y == 1], out[y == 2]
    return (some.mean(0) - others.mean(0)).square().sum() + some.exp().sum() / some.shape[0] + others.var(0).sum()


def of_positions(out, y):
    index = (y >= 0).nonzero().squeeze(1)
    return F.cross_entropy(out[index], y[index]) + out[torch.nonzero(y == 3)[:, 0]].square().mean()


def of_picked(out, y):
    mask = y >= 0
    some, own = out[mask], y[mask]
    return some[own > 1].square().sum() + F.cross_entropy(some, own)


def normed(out, y):
    some = out[y >= 0]
    some = (some - some.mean(0)) / (some.std(0) + 1e-3)
    return (some @ some.T).square().mean(1).mean() + F.layer_norm(some, (4,)).abs().sum() / 100


def softened(out, y):
    """What is infinite or NaN behind rows that are not picked stays out of gradients."""
    mask = y >= 0
    return torch.where(mask, out[:, 0] - out[:, 0].detach() + y, -1.0)[mask].add(1).log().mean() + out.exp().mean()


def rewritten(out, y):
    """A mask, and numbers that are not 0, written in place between two uses."""
    mask, some = y >= 0, y * 1
    parts = [out.detach()[mask].square().sum(), out.detach()[some.nonzero().squeeze(1)].sum()]
    mask &= y > 1
    some[mask] = 0
    parts += [out.detach()[mask].square().sum(), out.detach()[some.nonzero().squeeze(1)].sum()]
    mask[y == 3] = False
    parts += [out.detach()[mask].square().sum()]
    return sum(out[:, i % 4].mean() * part for i, part in enumerate(parts))


def twice(out, y):
    """Masks are computed wherever they are needed, as in many scripts."""
    some = F.cross_entropy(out[y >= 0], y[y >= 0]) + F.cross_entropy(out[~(y == -1)], y[~(y == -1)])
    unsure = out[(out.softmax(1).amax(1) < 0.3) & (y > 0)] - F.one_hot(y[(out.softmax(1).amax(1) < 0.3) & (y > 0)], 4)
    at = torch.where(y != -1)[0]
    some = some + out.masked_select(out.detach() > 0.1).sub(out[out.detach() > 0.1].tanh()).sum()
    return some + unsure.square().sum() / 100 + (out[at] - out[(y != -1).nonzero().squeeze(1)]).exp().mean()


def written_between(out, y):
    """What a mask is computed of is written."""
    kinds = y * 1
    parts = [out[kinds == 1].sum(0).mul(kinds[kinds == 1].sum())]
    kinds += 1
    parts += [out[kinds == 1].sum(0).mul(kinds[kinds == 1].sum())]
    kinds[kinds == 1] = 3
    parts += [out[kinds == 3].sum(0).mul(kinds[kinds == 3].sum())]
    one, two = kinds * 1, kinds * 1
    one += 1
    two -= 1
    parts += [out[one == 2].sum(0).mul(one[one == 2].sum()), out[two == 2].sum(0).mul(two[two == 2].sum())]
    return torch.stack(parts).square().mean() / 1e4


def in_place(out, y):
    """What was picked is written, also back to where it came from."""
    some = out[y >= 0]
    some += 1
    some.mul_(y[y >= 0][:, None].float())
    some[some > 1.5] = 0.5
    rows = out * 1
    rows[y == 1] += 2
    rows[y > 1] *= rows[y > 1].detach().exp()
    rows[y == 0] -= rows[y == 0].mean(0)
    parts = out[y == 1, 0].sum() + (out[y >= 0, 1:3] * out[y >= 0, ..., -2:]).sum() + out[y > 1, None, 3].exp().sum()
    return some.square().mean() + rows.square().mean() + parts / 100


LOSSES = [
    in_place, twice, written_between, rewritten,
    known, weighted, likelihood, entries, confident, of_parts, of_positions, of_picked, normed, softened,
]  # fmt: skip


def classes_graph():
    graph = planted_graph(dtype=torch.float64)
    y = torch.randint(0, 4, (graph.num_nodes,), generator=torch.Generator().manual_seed(3))
    y[::3] = -1
    graph.ndata["y"] = y
    return graph


def make(how="padded", loss=known, **options):
    return make_step(
        how, graph=classes_graph(), loss=loss, model_options={"out_channels": 4, "dropout": 0.0}, **options
    )


@pytest.mark.every(2)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_as_in_plain_pytorch(loss):
    padded, exact, plain = (make(how, loss) for how in ("padded", "exact", "padded"))
    optimizer = torch.optim.Adam(plain.model.parameters(), 1e-2)
    expected = plain_epoch(plain.model, plain.sampler, loss, optimizer, IDX, 130)
    assert len(set(expected)) > 1
    for step in (padded, exact):
        losses = [each.item() for each in list(step.epoch(IDX, 130, shuffle=False))]
        assert losses == pytest.approx(expected, rel=1e-8)
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(step.model.state_dict()[name], value, rtol=1e-6, atol=1e-8)
    assert padded.counters.fallbacks == 0


@pytest.mark.fuzz
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.fuzz)])
def test_compiled_by_inductor(dtype):
    """Losses are in float32 under autocast; rows that are picked within a model are not."""

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = (torch.nn.Linear(FEATURES, 8), torch.nn.Linear(8, 4))

        def forward(self, blocks, x):
            h = blocks[0].pull(fn.copy_u(self.first(x)), "mean")
            mask = blocks[0].dsts % 3 > 0
            return self.last(h - h[mask].mean(0))

    losses, graph = [], planted_graph()
    graph.ndata["y"] = classes_graph().ndata["y"]
    for options in ({}, {"backend": "eager"}, {"execution": "exact"}):
        model = Pooled()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sampler = joestar.NeighborSampler(graph, [4])
        step = joestar.compile(model, sampler, known, optimizer, autocast=dtype, **options)
        losses.append([loss.item() for loss in list(step.epoch(IDX, 200, shuffle=False))])
    for other in losses[1:]:
        assert losses[0] == pytest.approx(other, rel=1e-5 if dtype is None else 1e-2)


def test_labels_that_are_picked_are_checked_and_those_that_are_not_may_be_anything():
    """On a GPU PyTorch would end the process."""
    step = make()
    step.graph.ndata["y"][1:4] = torch.tensor([-7, 4, -1])
    with pytest.raises(LabelError, match="label 4 for node 2, which is out of range"):
        next(step.epoch(IDX, 130))
    step.graph.ndata["y"][2] = -8
    assert all(loss.isfinite() for loss in step.epoch(IDX, 130))


def test_a_mask_that_picks_nothing_gives_what_plain_pytorch_gives():
    """The sum of no rows is 0; their mean is NaN, and so is the loss."""

    def some(out, y):
        return out.square().mean() + out[y > 7].sum()

    def none(out, y):
        return F.cross_entropy(out[y > 7], y[y > 7])

    for how in ("padded", "exact"):
        assert all(loss.isfinite() for loss in list(make(how, some).epoch(IDX, 130)))


def rows_of_a_mask(model, block, h):
    return h[block.dsts % 2 == 0]


def columns_of_a_mask(model, block, h):
    return h @ model.square[model.kept].T


@pytest.mark.parametrize(
    ("form", "message"), [(rows_of_a_mask, "one row per seed"), (columns_of_a_mask, "has a size that a mask decides")]
)
def test_what_is_returned_has_a_size_that_is_known(form, message):
    """Rows, or columns, that are not picked would stand behind those that are."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.square = torch.nn.Parameter(torch.eye(FEATURES))
            self.register_buffer("kept", torch.arange(FEATURES) % 2 == 0)

        def forward(self, blocks, x):
            return form(self, blocks[0], blocks[0].pull(fn.copy_u(x), "mean"))

    graph = planted_graph()
    for how in ("padded", "exact"):
        step = joestar.compile(Net(), joestar.NeighborSampler(graph, [3]), backend="eager", execution=how)
        with pytest.raises(CaptureError, match=message):
            step(torch.arange(60))


def view_of_picked(rows):
    first = rows[:, 0]
    rows += 1
    return first.mean()


def assigned_as_many(out, y):
    """As many rows by chance: of two masks nobody knows."""
    rows = out * 1
    rows[y >= 0] = out[~(y < 0)]
    return rows.mean()


def assigned_from_another(out, y):
    rows = out * 1
    rows[y > 0] = out[y >= 0]
    return rows.mean()


def assigned_from_all(out, y):
    rows = out * 1
    rows[y > 0] = out.tanh()
    return rows.mean()


def assigned_wherever(out, y):
    rows = out * 1
    rows[y > -99] = out.tanh()
    return rows.mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out, y: out[y >= 0].amax(0).sum(), "raises in PyTorch if the mask picks no row.*torch.where"),
        (lambda out, y: out[y >= 0].sort(0)[0].mean(), "of rows that are picked by a mask.*aten.sort"),
        (lambda out, y: view_of_picked(out[y >= 0]), "view_of_picked.*writes to picked rows in place"),
        (lambda out, y: F.cross_entropy(out[y >= 0], y[y > 0]), "Write instead: compute a mask once"),
        (lambda out, y: F.mse_loss(out[y >= 0], out[y > 0]), "(?i)compute a mask once"),
        (lambda out, y: (out[y >= 0] + out[y > 0]).mean(), "(?i)compute a mask once"),
        (lambda out, y: (out[y >= 0] + out).mean(), "(?i)compute a mask once"),
        (lambda out, y: torch.cat([out[y >= 0], out[y > 0]], 1).mean(), "(?i)compute a mask once"),
        (lambda out, y: F.cross_entropy(out[y >= 0], y), "(?i)compute a mask once"),
        (assigned_as_many, "(?i)compute a mask once"),
        (assigned_from_all, "shape mismatch.*at .*rows\\[y > 0\\] = out"),
        (assigned_wherever, "needs a row for every row that the mask picks.*x\\[mask\\] = value\\[mask\\]"),
        (assigned_from_another, "shape mismatch.*at .*rows\\[y > 0\\] = out"),
        (lambda out, y: out[y >= 0, y[y >= 0]].mean(), "a mask beside other indices"),
        (lambda out, y: out[:, torch.ones(4).bool()].mean(), "a mask beside other indices"),
    ],
)
def test_what_has_no_such_form_is_refused_with_what_to_write_instead(loss, message):
    with pytest.raises(CaptureError, match=rf"(?s){message}"):
        list(make(loss=loss).epoch(IDX, 130))
