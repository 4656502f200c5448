"""Bad programs: an error that names the line and what to write instead, or the results of plain Python; nothing else.

What ``tests/lowering`` has already (test_capture_errors, test_in_place, test_padding_rows) is not repeated.
"""

import logging
import random
import time
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lowering.harness import OLDER, raises, refused_alone

from joestar.errors import CaptureError, PaddingError
from joestar.lowering import capture

from .worlds import World, refused, worlds_apart

COUNT = {"calls": 0}


class Counter:
    calls = 0


# --- Python side effects --------------------------------------------------------------------------------------------


def closure():
    calls = 0

    def operation(m, b, h):
        nonlocal calls
        calls += 1
        return h * calls

    return operation


def generator():
    numbers = iter(range(1, 100))

    def operation(m, b, h):
        return h * next(numbers)

    return operation


def memory():
    kept = {}

    def operation(m, b, h):
        if "h" not in kept:
            kept["h"] = h.detach().mean(0)
        return h - kept["h"]

    return operation


def default_argument(m, b, h, seen=[]):  # noqa: B006
    seen.append(1)
    return h * len(seen)


def global_dict(m, b, h):
    COUNT["calls"] += 1
    return h * COUNT["calls"]


def class_attribute(m, b, h):
    Counter.calls += 1
    return h * Counter.calls


def graph_data(m, b, h):
    b.graph.ndata["h"] = b.graph.ndata["h"] + 1
    return h


def whole_model(m, b, h):
    m.norm.train(False)
    return m.norm(h)


def warning(m, b, h):
    warnings.warn("rows", stacklevel=1)
    return h


def logged(m, b, h):
    logging.getLogger(__name__).info("rows")
    return h


def opened(m, b, h):
    with open("rows.txt", "w") as file:
        file.write("rows")
    return h


def clock(m, b, h):
    return h * (time.time() % 7)


def formatted(m, b, h):
    return h * len(str(h.sum()))


def backward_inside(m, b, h):
    (grad,) = torch.autograd.grad(h.pow(2).sum(), h, create_graph=True)
    return h - 0.1 * grad


def switched(m, b, h):
    m.average.requires_grad_(True)
    return h * m.average


OUTLIVES = "which outlives the call", "a registered buffer, changed in place"
SILENT = ("a captured program has no side effects",)
EFFECTS = {
    default_argument: OUTLIVES, global_dict: OUTLIVES, class_attribute: OUTLIVES,
    whole_model: OUTLIVES, warning: SILENT, logged: SILENT, opened: SILENT,
    clock: ("torch and joestar functions only",), formatted: ("keep the value in a tensor",),
    backward_inside: ("autograd runs once, behind the traced program",),
    switched: ("only what is in a registered buffer",),
}  # fmt: skip


@pytest.mark.parametrize("operation", EFFECTS, ids=lambda operation: operation.__name__)
def test_side_effects(operation):
    if operation is default_argument and torch.__version__ < "2.13":
        pytest.skip("TorchDynamo forgets it, also in torch.compile: a module's function with seen=[] sees it empty")
    refused(operation, *EFFECTS[operation])


@pytest.mark.parametrize("make", [closure, generator, memory], ids=lambda make: make.__name__)
def test_closures_that_change(make):
    refused(make(), *OUTLIVES)


def test_data_of_the_shared_graph():
    with pytest.raises(CaptureError, match=r"changes graph\.ndata, which outlives the call"):
        World.of(graph_data).trace()


# --- random numbers -------------------------------------------------------------------------------------------------


def python_random(m, b, h):
    return h * random.random()


def python_randint(m, b, h):
    return h * random.randint(1, 9)


def python_uniform(m, b, h):
    return h * random.uniform(1, 2)


def python_shuffle(m, b, h):
    columns = list(range(8))
    random.shuffle(columns)
    return h[:, columns]


def numpy_random(m, b, h):
    return h * np.random.rand()


def reseeded(m, b, h):
    torch.manual_seed(0)
    return h


def own_generator(m, b, h):
    return h * torch.rand(8, generator=torch.Generator().manual_seed(1))


DRAWS = [python_random, python_randint, python_uniform, python_shuffle, numpy_random, reseeded, own_generator]


@pytest.mark.parametrize("operation", DRAWS, ids=lambda operation: operation.__name__)
def test_other_random_numbers(operation):
    refused(operation, "F.dropout", "random values as features")


RANDOM = {
    "rand": lambda m, b, h: h * torch.rand(8), "rand_like": lambda m, b, h: h * torch.rand_like(h),
    "normal_": lambda m, b, h: h + h.new_empty(8).normal_(), "randperm": lambda m, b, h: h[torch.randperm(b.num_src)],
    "multinomial": lambda m, b, h: h * torch.multinomial(torch.ones(8), 8),
    "rrelu": lambda m, b, h: F.rrelu(h, training=True),
    "gumbel": lambda m, b, h: F.gumbel_softmax(h), "bernoulli": lambda m, b, h: h * torch.bernoulli(h.sigmoid()),
    "distribution": lambda m, b, h: torch.distributions.Normal(h, 1.0).rsample(),
    "alpha dropout": lambda m, b, h: F.alpha_dropout(h, 0.5, True),
}  # fmt: skip


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.every(3)
def test_random_operations(name):
    with pytest.raises(
        PaddingError, match=r"test_bad_programs\.py:.*would depend on the execution mode.*Use F\.dropout"
    ):
        World.of(RANDOM[name]).trace()


# --- sizes and rows -------------------------------------------------------------------------------------------------


def as_text(m, b, h):
    return h * len(f"{b.num_src}")


def halves(m, b, h):
    return h + h[: b.num_src // 2].sum(0)


def logarithm(m, b, h):
    return h / np.log(b.num_src)


def rows_in_a_list(m, b, h):
    return torch.stack([row * 2 for row in h])


def rows_by_number(m, b, h):
    return torch.stack([h[i] for i in range(len(h))])


def rows_apart(m, b, h):
    return torch.cat(h.split(1))


def counted_down(m, b, h):
    size = b.num_dst
    while size > 1:
        size = size // 2
        h = h * 1.1
    return h


def until_small(m, b, h):
    while h.norm() > 1:
        h = h / 2
    return h


def by_degree(m, b, h):
    return [h, -h][int(b.in_degrees()[0] > 1)]


def not_a_number(m, b, h):
    if torch.isnan(h).any():
        raise ValueError("NaN")
    return h


def largest_row(m, b, h):
    return h + h[h[:, 0].argmax()]


def few_nodes(m, b, h):
    if b.num_src > 1000:
        raise ValueError("too many")
    return h


SIZES = [as_text, halves, logarithm, rows_in_a_list, rows_by_number, rows_apart, counted_down, until_small, by_degree,
         not_a_number, largest_row, few_nodes]  # fmt: skip


@pytest.mark.parametrize("operation", SIZES, ids=lambda operation: operation.__name__)
@pytest.mark.every(2)
def test_loops_and_branches(operation, monkeypatch):
    """With few stand-in rows: TorchDynamo unrolls a loop over a thousand of them before it is refused."""
    monkeypatch.setattr(capture, "distinct_sizes", lambda count: [53 + 67 * position for position in range(count)])
    refused(operation)


NUMBERS = {
    "int": lambda m, b, h: h * int(b.num_src) / 50, "tensor": lambda m, b, h: h / torch.tensor(b.num_src),
    "square root": lambda m, b, h: h / b.num_src**0.5, "numel": lambda m, b, h: h / h.numel(),
    "length": lambda m, b, h: h / len(h), "difference": lambda m, b, h: h * (b.num_src - b.num_dst) / 50,
    "full": lambda m, b, h: h + torch.full((8,), b.num_src, dtype=h.dtype) / 50,
    "entries of a list": lambda m, b, h: h / torch.tensor([b.num_src, 1.0]).sum(),
}  # fmt: skip


def together(m, b, h):
    return sum(operation(m, b, h).tanh() for operation in NUMBERS.values())


def test_sizes_as_numbers_follow_the_batch():
    assert worlds_apart(operation=together) == {"exact": [], "padded": []}


ROWS = {
    "argsort": lambda m, b, h: h[h[:, 0].argsort()], "topk": lambda m, b, h: h + h.topk(2, 0)[0].sum(0),
    "cummax": lambda m, b, h: h + h.cummax(0)[0], "mode": lambda m, b, h: h - h.mode(0)[0],
    "kthvalue": lambda m, b, h: h - h.kthvalue(2, 0)[0], "histc": lambda m, b, h: h * torch.histc(h.detach(), 4).sum(),
    "isin": lambda m, b, h: h * torch.isin(b.srcs, b.dsts)[:, None],
    "svd": lambda m, b, h: h + torch.linalg.svdvals(h).sum(),
    "convolution": lambda m, b, h: h + F.conv1d(h.T[None], h.new_ones(8, 8, 3), padding=1)[0].T,
    "interpolation": lambda m, b, h: F.interpolate(h.T[None], scale_factor=1.0)[0].T,
    "pooling": lambda m, b, h: h + F.adaptive_avg_pool1d(h.T[None], 1)[0].T,
    "windows": lambda m, b, h: h + h.unfold(0, 2, 1).sum(),
}  # fmt: skip


def test_operations_that_mix_padded_rows():
    rows = {name: f for name, f in ROWS.items() if not (OLDER and name == "svd")}  # which the capture refuses there
    messages = refused_alone(rows)
    for name in rows:
        assert name in messages, f"{name} was not refused"
        assert "test_bad_programs.py:" in messages[name], messages[name]
        remedies = (
            "Use row-wise", "Across nodes use", "must be dimension 0", "Pool columns only", "look among a tensor",
            "Work along columns", "Write x.diagonal",
        )  # fmt: skip
        assert any(words in messages[name] for words in remedies)


# --- losses and results ---------------------------------------------------------------------------------------------


def loss_to_the_host(z, y):
    return F.cross_entropy(z, y).item()


def loss_that_branches(z, y):
    return z.sum() if y.max() > 1 else z.mean()


def test_loss_that_branches():
    refused(None, function=loss_that_branches, loss=loss_that_branches)


def test_loss_that_is_no_tensor():
    with pytest.raises(
        CaptureError, match=r"loss_to_the_host must return a tensor \(a number, 0-d\), or .*; got float\. Keep the"
    ):
        World.of(loss=loss_to_the_host).trace()


def loss_of_ranks(z, y):
    return z.sort(0)[0][0].sum()


def test_loss_that_mixes_padded_rows():
    with pytest.raises(PaddingError, match=r"test_bad_programs\.py:.*in loss_of_ranks"):
        World.of(loss=loss_of_ranks).steps("padded")


FORWARD = {
    "fewer rows": (lambda logits: logits[:2], "must return one row per seed; got shape"),
    "twice the rows": (lambda logits: torch.cat([logits, logits]), "must return one row per seed; got shape"),
    "a number": (lambda logits: logits.sum(), "must return one row per seed; got shape"),
    "nothing": (lambda logits: None, "forward must return at least one tensor, of one row per seed; got NoneType"),
    "a list": (lambda logits: [logits], "'list' object has no attribute 'sum'"),
}


@pytest.mark.parametrize("name", FORWARD)
def test_results_of_another_form(name):
    change, words = FORWARD[name]
    world = World.of(loss=lambda z, y: z.sum())
    forward = world.model.forward
    world.model.forward = lambda blocks, x: change(forward(blocks, x))
    with raises(CaptureError, words):
        world.trace()
