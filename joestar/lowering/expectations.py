"""What PyTorch asks of values in the middle of a model or a loss, and raises for: asked in captured programs, too.

``F.binary_cross_entropy`` takes probabilities, ``torch.distributions`` positive scales. PyTorch looks at every value on
a CPU, fails an assertion of the device on a GPU, and under a compiler looks at none: they would be trained on.
Here ``joestar::expect`` looks at them.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx
from torch.distributions import Distribution, constraints
from torch.distributions.utils import lazy_property

from joestar.lowering import fakes
from joestar.lowering.origin import node_line

_NO_SHAPE = torch.Size()
_ATEN, _EXPECT = torch.ops.aten, torch.ops.joestar.expect.default
_LOOKED_AT = (
    type(constraints.boolean), type(constraints.nonnegative_integer), type(constraints.positive),
    type(constraints.nonnegative), type(constraints.simplex), constraints.integer_interval, constraints.less_than,
    constraints.interval, constraints.half_open_interval,
)  # fmt: skip
"""Constraints that are asked for entry by entry; what is not a number stays none anyway, so reals are not."""
_WORDS = {
    "Boolean": "0 or 1", "IntegerGreaterThan": "a whole number of at least",
    "IntegerInterval": "a whole number between", "GreaterThan": "greater than", "GreaterThanEq": "at least",
    "LessThan": "less than", "Interval": "between", "HalfOpenInterval": "between",
    "Simplex": "probabilities that add up to 1",
}  # fmt: skip


# --- in the graph ---


def place_expectations(gm: fx.GraphModule) -> None:
    """Puts an expectation in front of every loss of probabilities, and the user's line into all there are."""
    for node in list(gm.graph.nodes):
        if node.target is _ATEN.binary_cross_entropy.default:
            _expect_probabilities(gm, node)
    for node in gm.graph.find_nodes(op="call_function", target=_EXPECT):
        told = f"{node.args[2]}; got {{}} at {node_line(node)}."
        node.args = (*node.args[:2], told)


def _expect_probabilities(gm: fx.GraphModule, loss: fx.Node) -> None:
    given = loss.args[0]

    def call(target: Callable, *args) -> fx.Node:
        made = gm.graph.call_function(target, args)
        made.meta = {**loss.meta, "val": fakes.run(gm.graph, target, *fx.map_arg(args, lambda arg: arg.meta["val"]))}
        return made

    with gm.graph.inserting_before(loss):
        within = call(_ATEN.bitwise_and.Tensor, call(_ATEN.ge.Scalar, given, 0), call(_ATEN.le.Scalar, given, 1))
        what = (
            "F.binary_cross_entropy expects probabilities, between 0 and 1 (torch.sigmoid of the model's outputs, or "
            "F.binary_cross_entropy_with_logits of the outputs as they are)"
        )
        loss.update_arg(0, call(_EXPECT, given, call(_ATEN.bitwise_not.default, within), what))


# --- while a program is traced ---


@contextlib.contextmanager
def checked_distributions() -> Iterator[None]:
    """Distributions whose values would be looked at have expectations within, in place of what cannot be traced.

    TorchDynamo switches their own checks off for the whole process, and for good: afterwards they are as before.
    """
    before, own = Distribution._validate_args, Distribution.__init__

    def checking(self, batch_shape=_NO_SHAPE, event_shape=_NO_SHAPE, validate_args=None):
        own(self, batch_shape, event_shape, False)
        self._is_checked = before if validate_args is None else validate_args
        if self._is_checked:
            _expect_parameters(self)

    changed = [(kind, vars(kind)["log_prob"]) for kind in _kinds(Distribution) if "log_prob" in vars(kind)]
    Distribution.__init__ = checking
    Distribution.set_default_validate_args(False)
    for kind, log_prob in changed:
        kind.log_prob = _expecting(log_prob)
    try:
        yield
    finally:
        Distribution.__init__ = own
        Distribution.set_default_validate_args(before)
        for kind, log_prob in changed:
            kind.log_prob = log_prob


def _kinds(kind: type) -> list[type]:
    """A class and all that are made of it, PyTorch's."""
    found = [kind] + [one for child in kind.__subclasses__() for one in _kinds(child)]
    return [one for one in dict.fromkeys(found) if one.__module__.startswith("torch.")]


def _is_looked_at(constraint) -> bool:
    if isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    return isinstance(constraint, _LOOKED_AT)


def _expect_parameters(distribution: Distribution) -> None:
    kind = type(distribution)
    for name, constraint in distribution.arg_constraints.items():
        if not _is_looked_at(constraint):
            continue
        if name not in distribution.__dict__ and isinstance(inspect.getattr_static(kind, name, None), lazy_property):
            continue
        value = getattr(distribution, name)
        if name in distribution.__dict__ and isinstance(value, Tensor):
            what = f"{kind.__name__} expects its {name} to be {_words(constraint)}"
            setattr(distribution, name, _expected(value, constraint, what))


def _expected(value: Tensor, constraint, what: str) -> Tensor:
    wrong = torch.logical_not(constraint.check(value))
    for _ in range(constraint.event_dim):
        wrong = wrong.unsqueeze(-1)
    return torch.ops.joestar.expect(value, wrong, what)


def _expecting(log_prob: Callable) -> Callable:
    @functools.wraps(log_prob)
    def checked(self, value):
        found = log_prob(self, value)
        if not getattr(self, "_is_checked", False):
            return found
        support = self.support
        if not _is_looked_at(support):
            return found
        what = f"{type(self).__name__}.log_prob expects every value to be {_words(support)}"
        return torch.ops.joestar.expect(found, torch.logical_not(support.check(value)), what)

    return checked


def _words(constraint) -> str:
    """``greater than 0.0``: a constraint as a message has it."""
    if isinstance(constraint, constraints.independent):
        constraint = constraint.base_constraint
    words = _WORDS[type(constraint).__name__.strip("_")]
    bounds = [getattr(constraint, name, None) for name in ("lower_bound", "upper_bound")]
    known = [f"{bound:g}" for bound in bounds if isinstance(bound, (int, float))]
    if not known and any(bound is not None for bound in bounds):
        known = ["the bounds of the distribution"]
    return f"{words} {' and '.join(known)}".strip()
