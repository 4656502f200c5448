"""The executions of one program on one batch, and what differs between two of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from lowering.harness import Outcome
from torch import Tensor
from where import DEVICE, on_host

from joestar.lowering.empty_sets import meetings
from joestar.lowering.sizes import size_table
from joestar.profile.sizes import measure, step_key
from joestar.runtime.program import Program
from joestar.runtime.seeds import filled

from . import plain
from .generate import FLOAT32, Written, in_short
from .subjects import Subject, build

TOLERANCE = 1e-8


class Runs:
    """The executions of one program on one batch; buffers are put back after each."""

    def __init__(self, subject: Subject, seeds: Tensor):
        self.subject, self.seeds = subject, seeds
        self.key = step_key(0, 0, 0, DEVICE)
        self.start = {name: value.clone() for name, value in subject.model.named_buffers()}

    def plain(self, autocast: torch.dtype | None = None) -> Outcome:
        """The user's program as written."""
        try:
            with torch.autocast(DEVICE.type, autocast, enabled=autocast is not None, cache_enabled=False):
                loss = plain.forward(self.subject, self.seeds, self.key)
        except Exception:
            self._put_back()  # batch norms in front of the error have counted
            raise
        return self._outcome(loss)

    def exact(self, program: Program) -> Outcome:
        """The optimised graph with true sizes."""
        (loss,), _ = program.exact(self.seeds, self.key)
        return self._outcome(loss)

    def padded(self, program: Program, factor: float, extra: int) -> Outcome:
        """The optimised graph under bounds of ``factor * size + extra``."""
        sizes, _ = measure(program.sampler, program.graph, self.seeds, self.key)
        batch = int(factor * len(self.seeds)) + extra
        program.compile([int(factor * size) + extra for size in sizes], batch)
        count = torch.full((), len(self.seeds), dtype=torch.int64)
        flag = torch.zeros((), dtype=torch.bool)
        (loss,), counts, ok = program.step(filled(self.seeds, batch), count, self.key, flag)
        if not ok and _meets_no_edges(program, counts):
            return self.exact(program)
        assert bool(ok), f"a batch that fits was called too large: counts {counts.tolist()}"
        return self._outcome(loss)

    def _outcome(self, loss: Tensor) -> Outcome:
        model = self.subject.model
        names, parameters = zip(*model.named_parameters(), strict=True)
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        try:
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        finally:  # whatever looks for anomalies
            self._put_back()
        zeros = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        return Outcome(loss.detach(), dict(zip(names, zeros, strict=True)), buffers)

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, value in self.subject.model.named_buffers():
                value.copy_(self.start[name])


def _meets_no_edges(program: Program, counts: Tensor) -> bool:
    """Whether there are none of edges whose rows meet what is computed from all of them."""
    gm, roles = program.captured.gm, program.captured.roles
    table = size_table(gm, roles)
    sizes = set().union(*meetings(gm, table).values())
    wanted = {table.bounds[symbol][0] for size in sizes for symbol in size.free_symbols & table.bounds.keys()}
    counted = zip(counts.tolist(), program.padded.checked, strict=True)
    return any(count == 0 and index in wanted for count, (index, _) in counted)


MOVES = 16
"""Of parameters, to see how far rounding may change a program's gradients."""


ROUNDING = {"bfloat16": (0.1, 2**-7), "float16": (0.03, 2**-10)}
"""Share of a tensor's scale that is no difference under autocast; the largest relative rounding."""


def in_float64(subject: Subject) -> Subject:
    """A program under autocast in float64, without autocast, with the same weights."""
    short = in_short(subject.written.autocast)
    head = subject.written.head.replace(FLOAT32, "").replace(short, short + ".double()")  # features are rounded as here
    (twin,) = build([replace(subject.written, head=head, autocast="")])
    twin.model.load_state_dict(subject.model.state_dict())
    return twin


class Tolerance:
    """What tensors may be off by under autocast: a few times what plain execution under autocast is off by in float64.

    Args:
        expected: of plain execution under autocast.
    """

    def __init__(self, subject: Subject, seeds: Tensor, expected: Outcome):
        self.twin = in_float64(subject)
        self.seeds, self.true, self.off, self.moved = seeds, Runs(self.twin, seeds).plain(), {}, False
        self._take_in(expected)
        self.share, self.rounding = ROUNDING[subject.written.autocast]

    def _take_in(self, got: Outcome) -> None:
        for kind, values, wanted in _groups(got, self.true):
            for name, value in wanted.items():
                self.off[kind, name] = max(self.off.get((kind, name), 0.0), _off(values[name], value))

    def __call__(self, kind: str, name: str, scale: float) -> float:
        """The largest difference that is none."""
        return 4 * self.off[kind, name] + self.share * scale

    def move(self) -> bool:
        """Takes in what float64 is off by when parameters and modules' results move by some roundings.

        Where a leaky ReLU's input is next to nothing, its slope is a matter of rounding, and of the order of sums;
        where a batch norm's rows are equal, so is its gradient. Returns whether that is new.
        """
        if self.moved:
            return False
        self.moved = True
        random = torch.Generator().manual_seed(0)
        for _ in range(MOVES):
            with rounded(self.twin.model, self.rounding, random):
                self._take_in(Runs(self.twin, self.seeds).plain())
        return True


@contextmanager
def rounded(model: torch.nn.Module, rounding: float, random: torch.Generator) -> Iterator[None]:
    """Parameters, as they are now, and results of modules move by up to two roundings within."""

    def moved(tensor: Tensor | tuple | None) -> Tensor | tuple | None:
        if not isinstance(tensor, Tensor):  # results of attention, and weights that nobody asked for
            return tensor if tensor is None else tuple(map(moved, tensor))
        with on_host():
            noise = torch.rand(tensor.shape, generator=random, dtype=tensor.dtype) * 2 - 1
        return tensor * (1 + 2 * rounding * noise.to(tensor.device))

    start = [parameter.detach().clone() for parameter in model.parameters()]
    modules = [module for module in model.modules() if module is not model]
    hooks = [module.register_forward_hook(lambda module, args, out: moved(out)) for module in modules]
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(moved(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        for hook in hooks:
            hook.remove()


def _off(value: Tensor, reference: Tensor) -> float:
    return _largest(value - reference)


def _largest(value: Tensor) -> float:
    """Of the finite entries."""
    finite = value[torch.isfinite(value)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _as_infinite(value: Tensor, reference: Tensor) -> bool:
    """Whether two tensors are not finite in the same places, with the same values there: NaN is NaN."""
    places = torch.isfinite(reference)
    if value.shape != reference.shape or not torch.equal(torch.isfinite(value), places):
        return False
    return torch.equal(value[~places].nan_to_num().double(), reference[~places].nan_to_num().double())


def _groups(got: Outcome, expected: Outcome) -> list[tuple[str, dict, dict]]:
    return [("loss", {"": got.loss}, {"": expected.loss}), ("buffer", got.buffers, expected.buffers),
            ("gradient of", got.grads, expected.grads)]  # fmt: skip


def usual(kind: str, name: str, scale: float) -> float:
    """The largest difference that is none, in float64."""
    return TOLERANCE * scale


def of_sixths(kind: str, name: str, scale: float) -> float:
    """Likewise where PyTorch's kernel for the derivative of the hard sigmoid takes part, or on a GPU that of the hard
    swish: its 1/6 is a float32."""
    return 10 * TOLERANCE * scale


def exchanged(program: Program, model: torch.nn.Module) -> set[str]:
    """Names of the weights whose product and aggregation changed places.

    A row without edges is an empty sum. Where rows are updated first, the gradient that reaches it goes nowhere; where
    they are aggregated first, the product multiplies it by zeros, and if it is NaN, the weight's gradient is, too.
    """
    places = [place for place in program.places if place.pattern == "spmm-gemm-order" and place.fired]
    words = {word for place in places for word in place.detail.split()}
    nodes = program.lowered.find_nodes(op="placeholder")
    weights = [role.tensor for node, role in zip(nodes, program.lowered_roles, strict=True) if node.name in words]
    return {name for name, value in model.named_parameters() if any(value is weight for weight in weights)}


def differences(got: Outcome, expected: Outcome, tolerance=usual, exchanged=frozenset()) -> list[str]:
    """Every tensor that is off by more than ``tolerance(kind, name, scale)``, with words.

    The scale of a tensor is its largest entry; of a gradient, not less than a thousandth of the largest of all: what
    cancels to nothing (a bias in front of a batch norm) has no scale of its own; of 16 bits, a tenth. What is NaN or
    infinite in plain PyTorch (a standard deviation of one row) has to be so here, and nothing else. But where the loss
    itself is NaN, of gradients of ``exchanged`` weights only what is finite in both is compared.
    """
    found = []
    largest = max(map(_largest, expected.grads.values()), default=0.0)
    for kind, values, references in _groups(got, expected):
        floor = largest * (0.1 if isinstance(tolerance, Tolerance) else 1e-3) if kind == "gradient of" else 0.0
        for name, reference in references.items():
            value = values[name]
            if isinstance(tolerance, Tolerance) and not torch.isfinite(reference).all():
                continue  # 16 bits overflow in plain execution
            if kind == "gradient of" and name in exchanged and expected.loss.isnan() and value.shape == reference.shape:
                both = torch.isfinite(value) & torch.isfinite(reference)
                value, reference = value[both], reference[both]
            if not _as_infinite(value, reference):
                found.append(f"{kind} {name}: not finite, or another shape".replace(" :", ":"))
                continue
            scale = max(_largest(reference), floor, 1e-6)
            off = _off(value, reference)
            same = value.shape == reference.shape and value.dtype == reference.dtype
            if not same or off > tolerance(kind, name, scale):
                found.append(f"{kind} {name}: off by {off:.3g} at a scale of {scale:.3g}".replace(" :", ":"))
    return found


def autocast_of(written: Written) -> torch.dtype | None:
    """The dtype under which a program runs."""
    return getattr(torch, written.autocast) if written.autocast else None
