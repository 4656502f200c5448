"""What cannot be captured: the error names the user's line and what to write instead."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from joestar.errors import CaptureError

from .harness import OLDER, WIDTH, Case, Rows, check

pytestmark = pytest.mark.every(3)

CALLS = [0]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


def branch_on_data(m, b, h):
    return h if h.sum() > 0 else -h


def item(m, b, h):
    return h * h.sum().item()


def conversion(m, b, h):
    return h * float(h.detach().max())


def mask(m, b, h):
    return h + h[:, h[0] > 0].sum()


def nonzero(m, b, h):
    return h + h[h.nonzero()[:, 0]].sum(0)


def unique(m, b, h):
    return h + torch.unique(b.graph_degrees("src")).sum()


def printing(m, b, h):
    print(h.shape)
    return h


def tolist(m, b, h):
    return h * h[0].tolist()[0]


def branch_on_size(m, b, h):
    return h if b.num_src > 20 else -h


def branch_on_edges(m, b, h):
    return h if b.num_edges > b.num_dst else -h


def odd(m, b, h):
    return h if len(h) % 2 else -h


def loop_over_size(m, b, h):
    for _ in range(b.num_dst):
        h = h + 1
    return h


def exponential(m, b, h):
    return h * math.exp(-b.num_dst / 10)


def first_rows(m, b, h):
    return h + h[:3].sum(0)


def attribute(m, b, h):
    m.calls = m.calls + 1
    return h


def buffer(m, b, h):
    m.average = 0.9 * m.average + 0.1 * h.detach().mean(0)
    return h - m.average


def appended(m, b, h):
    m.seen.append(h)
    return h


def outside(m, b, h):
    CALLS[0] += 1
    return h


def mode(m, b, h):
    m.norm.eval()
    return m.norm(h)


def recomputed(m, b, h):
    return checkpoint(torch.relu, h, use_reentrant=False)


def conditional(m, b, h):
    return torch.cond(h.sum() > 0, lambda h: h * 1, lambda h: -h, (h,))


def mapped(m, b, h):
    return torch.vmap(lambda row: row * 2)(h)


def hooked(m, b, h):
    h.register_hook(lambda grad: grad * 2)
    return h


def own_backward(m, b, h):
    return Reversed.apply(h)


def compared(m, b, h):
    return h if torch.equal(h, h + 1) else -h


def one_hot(m, b, h):
    return h + torch.nn.functional.one_hot(b.graph_degrees("src")).sum()


def counted(m, b, h):
    return h if torch.bincount(b.indices % WIDTH, minlength=WIDTH).shape[0] == WIDTH else -h


def other_sets(m, b, h):
    return h if torch.unique(b.indices).shape[0] == h.shape[0] else -h


def few_rows(m, b, h):
    return h - h.mean(0) if h.size(0) > 1 else h


def one_row(m, b, h):
    return h if len(h) == 1 else h - h.mean(0)


def any_edges(m, b, h):
    return h if b.num_edges else h * 2


def no_edges(m, b, h):
    return h * 2 if not b.indices.numel() else h


def twice(m, b, h):
    return h * 2 if 3 * b.num_edges == 0 else h


def asserted(m, b, h):
    assert h.shape[0] != 1
    return h


def flagged(m, b, h):
    return h * float(h.shape[0] >= 2)


def any_of_both(m, b, h):
    return h * 2 if b.num_edges + b.num_src < 2 else h


def at_least_one(m, b, h):
    return h / max(b.num_edges, 1)


def at_most_one(m, b, h):
    return h * min(1, b.num_edges)


def none_in_shape(m, b, h):
    return h * 2 if 0 in h.shape else h


def float_in_shape(m, b, h):
    return h * 2 if 1.0 in (b.num_edges,) else h


def number_in_sizes(m, b, h):
    return h * 2 if 5 in [b.num_edges, WIDTH] else h


def loop_over_few(m, b, h):
    for row in range(min(h.shape[0] - 1, 2)):
        h = h + row
    return h


def share_of_others(m, b, h):
    return h if 1 / (h.shape[0] - 1) < 0.9 else h * 2


def own_set(m, b, h):
    return h * b.remove_self_loops().in_degrees().sum()


TENSOR = ("torch.where on whole tensors",)
HOST = ("keep the value in a tensor",)
SIZED = ("depends on data", "Write instead: x[mask], and columns of that; torch.where(mask, x, 0)")
BRANCH = ("holds only for some sizes of sampled sets", "does not branch on")
OUTLIVES = ("which outlives the call", "a registered buffer, changed in place")
HIGHER = ("higher-order function", "call plain torch functions")

ERRORS = [
    (branch_on_data, TENSOR), (item, HOST), (conversion, HOST), (mask, SIZED), (nonzero, SIZED), (unique, SIZED),
    (one_hot, ("F.one_hot(ids, num_classes=C)",)), (counted, ("F.one_hot(ids, C).sum(0)",)),
    (other_sets, ("sets whose size is known", "self.graph")),
    (printing, ("remove the print",)), (tolist, HOST), (compared, HOST),
    (branch_on_size, ("num_src (of sampled set 2) > 20", *BRANCH)),
    (branch_on_edges, ("num_edges (of sampled set 1) > num_seeds", *BRANCH)),
    (odd, ("Mod(num_src", *BRANCH)), (exponential, ("num_seeds", *BRANCH)), (first_rows, ("num_src", *BRANCH)),
    (few_rows, ("num_src (of sampled set 2) > 1", *BRANCH)), (one_row, ("Ne(num_src (of sampled set 2), 1)", *BRANCH)),
    (any_edges, ("Ne(num_edges (of sampled set 1), 0)", *BRANCH)),
    (no_edges, ("num_edges (of sampled set 1)", *BRANCH)),
    (twice, ("num_edges (of sampled set 1)", *BRANCH)), (asserted, ("num_src (of sampled set 2), 1)", *BRANCH)),
    (flagged, ("num_src (of sampled set 2) >= 2", *BRANCH)), (share_of_others, ("num_src", *BRANCH)),
    (any_of_both, ("num_src (of sampled set 2) + num_edges (of sampled set 1) >= 2", *BRANCH)),
    (at_least_one, ("max(num_edges (of sampled set 1), 1) = num_edges", "torch.tensor(size).clamp(min=1)", *BRANCH)),
    (at_most_one, ("min(num_edges (of sampled set 1), 1) = 1", *BRANCH)),
    (none_in_shape, ("0 in", "num_src (of sampled set 2)", *BRANCH)),
    (float_in_shape, ("1 in", "num_edges (of sampled set 1)", *BRANCH)),
    (number_in_sizes, ("5 in", "num_edges (of sampled set 1)", *BRANCH)),
    (loop_over_few, ("Min(2, num_src (of sampled set 2) - 1) = 2", *BRANCH)),
    (loop_over_size, ("sizes vary per batch",)),
    (attribute, ("changes model.calls", *OUTLIVES)), (buffer, ("changes a buffer of model", *OUTLIVES)),
    (appended, ("changes model.seen", *OUTLIVES)), (outside, ("changes lowering.test_capture_errors.CALLS", *OUTLIVES)),
    (own_set, ("where its size was not measured", "Write instead: in the sampler's sample() what makes sets")),
    (mode, ("changes model.norm.training", *OUTLIVES)),
    (recomputed, HIGHER), (conditional, HIGHER), (hooked, HIGHER), (own_backward, HIGHER), (mapped, ("torch.vmap",)),
]  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize(("operation", "words"), ERRORS, ids=[operation.__name__ for operation, _ in ERRORS])
def test_error_names_line_and_remedy(operation, words):
    model = Rows(operation, average=torch.zeros(WIDTH), norm=nn.BatchNorm1d(WIDTH))
    model.calls, model.seen = 0, []
    with pytest.raises(CaptureError) as caught:
        Case(model).trace()
    message = str(caught.value)
    assert message.startswith("Rows with NeighborSampler")
    for word in words:
        assert word in message
    if operation is not mapped:  # vmap leaves its own frames only
        assert "test_capture_errors.py:" in message
        assert f" in {operation.__name__}" in message


ORDERED = "use max, min, mean, var or softmax"
DECOMPOSED = "a decomposition of a sampled set's rows", "x.T @ x"
ACROSS = {
    "topk": (lambda m, b, h: h + h.topk(3, dim=0)[0].sum(), "topk takes the k largest of", ORDERED),
    "kthvalue": (lambda m, b, h: h + h.kthvalue(3, dim=0)[0], "kthvalue sorts the rows", ORDERED),
    "quantile": (
        lambda m, b, h: h + torch.quantile(h, 0.5, dim=0),
        *(("torch.quantile until PyTorch 2.13",) if OLDER else ("quantile sorts the rows", ORDERED)),
    ),
    "pinv": (lambda m, b, h: h + torch.linalg.pinv(h).sum(), *DECOMPOSED),
    "cdist": (lambda m, b, h: h + torch.cdist(h, h).mean(), "torch.cdist computes", "donot_use_mm_for_euclid_dist"),
    "a branch beside": (lambda m, b, h: h.topk(1, dim=1)[0] * h if b.num_src > 20 else h, *BRANCH),
}
if OLDER:  # later it is padding that refuses it
    ACROSS["svd"] = (lambda m, b, h: h + torch.linalg.svdvals(h).sum(), *DECOMPOSED)


@pytest.mark.parametrize("name", ACROSS)
def test_functions_that_ask_for_the_number_of_rows(name):
    """What they do is said, and what to do instead; not that a program of the user's branches."""
    operation, *words = ACROSS[name]
    with pytest.raises(CaptureError) as caught:
        Case(Rows(operation)).trace()
    assert all(word in str(caught.value) for word in (*words, "test_capture_errors.py:"))
    assert "frame #" not in str(caught.value)  # of C++
    assert ("branch" in name) == ("does not branch on" in str(caught.value))


ALONG = {
    "all rows": (nn.GRU(WIDTH, WIDTH), lambda h: h),
    "rows first": (nn.LSTM(WIDTH, WIDTH), lambda h: h[:, None]),
    "one batch": (nn.RNN(WIDTH, WIDTH, batch_first=True), lambda h: h[None]),
}


@pytest.mark.parametrize("name", ALONG)
def test_recurrent_layers_along_rows_are_refused_before_their_steps_are_traced(name):
    layer, rows = ALONG[name]
    with pytest.raises(CaptureError, match=rf"(?s)nn.{type(layer).__name__} goes along .* nn.GRUCell and") as caught:
        Case(Rows(lambda m, b, h: m.layer(rows(h))[0].reshape(-1, WIDTH), layer=layer)).trace()
    assert "test_capture_errors.py:" in str(caught.value)


def test_distances_of_all_pairs():
    """In the way that the error points out."""
    mode = "donot_use_mm_for_euclid_dist"
    check(Rows(lambda m, b, h: h + torch.cdist(h, m.first.weight.t(), compute_mode=mode).sum(1, keepdim=True)))
    check(Rows(lambda m, b, h: h + torch.cdist(h, h, compute_mode=mode).mean(1, keepdim=True)))


def assigned_in_place(m, b, h):
    m.average += h.detach().mean(0)
    m.average *= 0.9
    m.average = m.average.sub_(0.1).clamp_(-1, 1)
    return h - m.average


def test_buffers_assigned_in_place_are_written_in_place():
    """``self.average += x`` assigns the very tensor that was there."""
    check(Rows(assigned_in_place, average=torch.zeros(WIDTH)))


def swapped(m, b, h):
    m.average = m.other.add_(1)
    return h - m.average


def replaced(m, b, h):
    m.average = m.average.add_(1) * 0.5
    return h - m.average


@pytest.mark.parametrize("operation", [swapped, replaced], ids=lambda operation: operation.__name__)
def test_other_assignments_to_buffers_are_refused(operation):
    with pytest.raises(CaptureError, match="changes a buffer of model, which outlives the call"):
        Case(Rows(operation, average=torch.zeros(WIDTH), other=torch.ones(WIDTH))).trace()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (nn.utils.weight_norm, "torch.nn.utils.parametrizations.weight_norm, which replaces no attribute"),
        (nn.utils.spectral_norm, "torch.nn.utils.parametrizations.spectral_norm, which replaces no attribute"),
    ],
)
def test_normed_weights_name_what_can_be_compiled(wrap, words):
    def operation(m, b, h):
        return m.layer(h)

    model = Rows(operation)
    model.layer = wrap(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError) as caught:
        Case(model).trace()
    assert words in str(caught.value) and " in operation" in str(caught.value)
    for fine in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        Case(Rows(operation, layer=fine(nn.Linear(WIDTH, WIDTH)))).trace()


def test_pruned_layers_name_what_can_be_compiled():
    model = Rows(lambda m, b, h: m.layer(h))
    model.layer = nn.Linear(WIDTH, WIDTH)
    prune.l1_unstructured(model.layer, "weight", 0.5)
    with pytest.raises(CaptureError, match=r"torch.nn.utils.prune.remove\(layer, name\) before compile"):
        Case(model).trace()
    prune.remove(model.layer, "weight")
    Case(model).trace()


def test_autocast_within_a_model_names_the_option():
    def operation(m, b, h):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return h @ h.new_ones(WIDTH, WIDTH)

    with pytest.raises(CaptureError, match=r"torch.autocast within .* autocast=torch.bfloat16"):
        Case(Rows(operation)).trace()


def test_nothing_happens_twice():
    """A refused program has not run: Python objects and buffers are as they were."""
    model = Rows(appended, average=torch.zeros(WIDTH))
    model.seen = []
    with pytest.raises(CaptureError):
        Case(model).trace()
    assert model.seen == []


def test_harmless_python_is_captured():
    """Local containers, attributes of blocks, assertions on sizes that always hold."""

    def operation(m, b, h):
        assert b.num_src >= b.num_dst
        assert h.shape == (b.num_src, WIDTH)
        assert b.num_src > 0 and len(h) >= 1 and b.num_edges >= 0
        h = h / max(b.num_src, 1) / max(b.num_edges, 2) * min(b.num_edges, 5) / torch.tensor(b.num_edges).clamp(min=1)
        b.cache = [h]
        names = {"h": h}
        names["g"] = b.cache.pop()
        return names["h"] + names["g"] if b.num_dst <= h.shape[0] else h

    Case(Rows(operation)).trace()
