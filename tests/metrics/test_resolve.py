"""``metric=`` as it is given, and what kind of prediction labels ask for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from joestar.errors import ConfigError, LabelError
from joestar.metrics import Task, aligned, better, infer_task, named, resolve, resolve_all

FLOATS, CLASSES = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([2, 0, -100])
ONE, THREE = torch.zeros(3, 1), torch.zeros(3, 3)
MANY = torch.tensor([[0.0, 1.0, math.nan]] * 3)


@pytest.mark.parametrize(
    ("output", "target", "loss", "kind"),
    [
        (THREE, CLASSES, F.cross_entropy, "multiclass"),
        (THREE, CLASSES[:, None], F.cross_entropy, "multiclass"),
        (THREE, CLASSES, None, "multiclass"),
        (THREE, THREE + 1 / 3, nn.CrossEntropyLoss(), "multiclass"),
        (ONE, torch.tensor([0, 1, -1]), None, "binary"),
        (ONE, FLOATS, F.binary_cross_entropy_with_logits, "binary"),
        (ONE, FLOATS, F.mse_loss, "regression"),
        (ONE, FLOATS + 0.5, None, "regression"),
        (ONE, FLOATS, lambda out, y: out.mean(), "binary"),
        (THREE, MANY, None, "multilabel"),
        (THREE, MANY, nn.BCEWithLogitsLoss(), "multilabel"),
        (THREE, MANY, nn.MSELoss(), "regression"),
        (THREE, MANY + 2, None, "regression"),
        (THREE, torch.tensor([[0, 1, 1]] * 3), None, "multilabel"),
    ],
)
def test_task(output, target, loss, kind):
    assert infer_task(output, target, loss).kind == kind


def test_the_task_does_not_depend_on_the_nodes_that_are_scored():
    every = torch.tensor([0.0, 1.0, 2.5])
    assert infer_task(ONE[:2], every[:2], None, every).kind == "regression"


@pytest.mark.parametrize(
    ("output", "target", "loss", "message"),
    [
        (ONE, FLOATS / 2, F.binary_cross_entropy_with_logits, "values beside 0, 1 and NaN: it is not clear"),
        (
            ONE,
            torch.tensor([0, 7, 2]),
            None,
            r"labels go up to 7 and outputs are \[3, 1\]: classes need an output each",
        ),
        (ONE, torch.tensor([0, 1, 1]), F.mse_loss, r"holds integers: convert it with .float\(\)"),
    ],
)
def test_what_is_not_clear_is_an_error(output, target, loss, message):
    with pytest.raises(LabelError, match=message):
        infer_task(output, target, loss)


def test_outputs_and_labels_are_brought_into_one_form():
    output = torch.tensor([[0.2], [0.7], [0.9]])
    task = infer_task(output, FLOATS, F.binary_cross_entropy)
    assert task.probabilities and resolve("accuracy")(output, FLOATS, task) == 1.0, "yes above 0.5, not 0"
    assert resolve("rmse")(output, FLOATS, Task("regression")) == pytest.approx(math.sqrt((0.04 + 0.09 + 0.01) / 3))
    logits, ids = torch.eye(3), torch.tensor([[0], [-100], [9]])
    task = infer_task(logits, ids, nn.CrossEntropyLoss(ignore_index=9))
    assert resolve("accuracy")(logits, ids, task) == 1.0, "the loss leaves out 9 and -100"
    heads = torch.eye(3).repeat(4, 1, 1)  # [n, C, heads]
    assert resolve("accuracy")(heads, torch.arange(3).repeat(4, 1), Task("multiclass")) == 1.0
    for output, target, kind in ((THREE, FLOATS, "regression"), (torch.zeros(3), MANY, "multilabel")):
        with pytest.raises(LabelError, match=r"cannot score outputs .* against labels .*: expected the same shape"):
            aligned(output, target, Task(kind))
    with pytest.raises(LabelError, match="nothing to score"):
        aligned(ONE, FLOATS * math.nan, Task("regression"))


def test_names():
    assert (resolve("RMSE").mode, resolve("auc").name, resolve("auc").mode) == ("min", "roc_auc", "max")
    assert [m.name for m in resolve_all(None, None, "regression")] == ["rmse", "mae", "r2"]
    assert {"accuracy", "f1_micro", "f1_macro", "roc_auc", "ap", "mae", "rmse", "r2"} <= set(named())
    for bad, message in (
        ("acuracy", "no metric 'acuracy'; Did you mean 'accuracy'"), (3, "must be a name .*; got int")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            resolve(bad)
    with pytest.raises(ConfigError, match=r"'rmse' is none of a multiclass task.* expected one of accuracy"):
        resolve("rmse", None, "multiclass")
    with pytest.raises(ConfigError, match="mode='max' contradicts metric 'rmse', of which less is better"):
        resolve("rmse", "max")
    with pytest.raises(ConfigError, match="mode must be 'min' or 'max'; got 'up'"):
        resolve("rmse", "up")


class Hits:
    """As torchmetrics has them: looks at what it is given as strictly as they do."""

    higher_is_better = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.seen = 0

    def update(self, output, target):
        assert not target.dtype.is_floating_point, "expected integers"
        self.right += (output.argmax(1) if output.dim() > 1 else output > 0.5).eq(target).sum()
        self.seen += target.numel()

    def compute(self):
        return torch.as_tensor(self.right / self.seen)


def test_objects_and_functions():
    logits, hits = torch.eye(3), Hits()
    metric = resolve(hits)
    assert (metric.name, metric.mode) == ("Hits", "max")
    for _ in range(2):  # nothing is left from one call to the next
        assert metric(logits, torch.tensor([0, 2, -100]), Task("multiclass")) == 0.5
    assert metric(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0, 1.0]), Task("binary")) == 0.5
    with pytest.raises(LabelError, match="NaN for some entries of a node, which metric object Hits cannot leave out"):
        metric(THREE, MANY, Task("multilabel"))

    def spread(output, target):
        return output["a"].max() - target.min()

    metric = resolve(spread)
    assert (metric.name, metric.mode, resolve(spread, "min").mode) == ("spread", None, "min")
    assert metric({"a": torch.tensor([5.0])}, torch.tensor([2.0])) == 3.0
    with pytest.raises(ConfigError, match="'lambda' gave a dict: expected one number"):
        resolve(lambda output, target: {})(logits, CLASSES)
    with pytest.raises(ConfigError, match="needs one tensor of outputs; the model returns a tuple"):
        resolve("accuracy")((logits, logits), CLASSES)
    with pytest.raises(ConfigError, match="'lambda' gave a Tensor: expected one number"):
        resolve(lambda output, target: output[0])(logits, CLASSES)
    both = resolve_all({"mine": spread, "x": "rmse"}, "max")
    assert [(m.name, m.mode) for m in both] == [("mine", "max"), ("x", "min")]
    assert both[1](ONE + 2, FLOATS + 0.5, Task("regression")) == resolve("rmse")(ONE + 2, FLOATS + 0.5)


class Module(Hits, nn.Module):
    """A metric as torchmetrics has them: a module, which can be called."""

    def __init__(self):
        nn.Module.__init__(self)
        Hits.__init__(self)

    def forward(self, output, target):
        raise AssertionError("a metric is updated, not called")


def test_modules_are_objects():
    assert not resolve(Module()).is_function and resolve(nn.functional.mse_loss).is_function
    assert resolve(Module())(torch.tensor([[3.0], [-1.0]]), torch.tensor([1.0, 1.0]), Task("binary")) == 0.5


def test_two_metrics_of_one_name_are_refused():
    """Scores go by their names: one overwrote the other, and decided which epoch was the best."""
    for several in ([Hits(), Hits()], [lambda out, y: 0.0, lambda out, y: 1.0], ["auc", "roc_auc"]):
        with pytest.raises(ConfigError, match=r"two metrics are called .*metric=\{'\w+_1': ..., '\w+_2': ...\}"):
            resolve_all(several)
    named_apart = resolve_all({"a": Hits(), "b": Hits(), "loss": lambda out, y: 0.0})
    assert [m.name for m in named_apart] == ["a", "b", "loss"] and not named_apart[-1].is_loss
    assert resolve_all({"own": "loss"})[0].is_loss


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-7), (torch.bfloat16, 1e-2), (torch.float64, 1e-30)])
@pytest.mark.parametrize("name", ["roc_auc", "ap"])
def test_small_probabilities_keep_their_order(dtype, scale, name):
    generator = torch.Generator().manual_seed(0)
    raw = torch.rand(1000, generator=generator, dtype=torch.float64)
    y = (torch.rand(1000, generator=generator, dtype=torch.float64) < raw).double()
    output = (raw * scale).to(dtype)
    expected = resolve(name)(output.double().log(), y, Task("binary"))
    assert resolve(name)(output, y, Task("binary", probabilities=True)) == pytest.approx(expected, abs=1e-12)
    assert resolve(name)(1 - output.double(), 1 - y, Task("binary", probabilities=True)) <= 1
    given = Given()
    resolve(given)(output, y, Task("binary", probabilities=True))
    assert torch.equal(given.output, output), "objects get what the model returned"


class Given(Hits):
    def update(self, output, target):
        super().update(output, target)
        self.output = output


def test_better():
    assert better(1.0, None, "max") and better(1.0, math.nan, "max") and not better(math.nan, 0.0, "max")
    assert better(1.0, 2.0, "min") and not better(1.0, 1.0, "min") and better(2.0, 1.0, "max")
