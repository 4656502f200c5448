"""Single ops, padded, with hostile numbers in the padded slots: values and gradients of valid rows must not notice.

By induction over a graph: if every op makes finite padded slots of finite ones, and zero gradients of zero gradients,
then whatever padding holds, no NaN reaches a parameter.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from joestar.lowering.functional import remove_in_place
from joestar.lowering.inputs import SEEDS, constant
from joestar.lowering.padding import pad
from joestar.lowering.rules.norm import lower_batch_norm
from joestar.lowering.sizes import expression
from joestar.lowering.traced_losses import traced_losses

ROWS, HINT = 6, 1009
"""Valid rows, and the stand-in for their number while an op is traced."""

HOSTILE = (0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, -1e-30, 100.0, -800.0)
"""What padded slots hold; ``exp`` of 100 is infinite in float32, and so is the square of 1e30."""

TURNS = ((3, 5, 0), (4, 6, 1), (7, 8, 2), (0, 2, 4), (3, 5, 7))
"""Which of them the last real rows hold, in turns: first the same in all columns, in the last two side by side.

No column holds 1e30 and -1e30: what remains of a sum over rows in which these cancel depends on its order.
"""
UNIFORM = 3

WAITING = {f"aten::{name}" for name in ("item", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")}
ON_CPUS = {
    f"aten::{name}"
    for name in ("one_hot", "multilabel_margin_loss_forward", "rrelu_with_noise", "quantile", "nanquantile")
}
"""These look at values on CPUs only."""


@dataclass
class Operand:
    """An argument of an op under test: rows of the batch, or something that all rows share.

    Attributes:
        shape: trailing shape of rows, or the whole shape if shared.
        make: valid values of a shape in float64.
        grad: whether it is differentiated; dtype: integers and booleans stay what they are.
    """

    shape: tuple[int, ...] = (4,)
    shared: bool = False
    make: Callable | None = None
    dtype: torch.dtype = torch.float64
    grad: bool = True

    def valid(self, seed: int) -> Tensor:
        """Valid values."""
        generator = torch.Generator().manual_seed(seed)
        shape = self.shape if self.shared else (ROWS, *self.shape)
        values = torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1
        return (values if self.make is None else self.make(values)).to(self.dtype)


def rows(*shape: int, make=None, dtype=torch.float64, grad=True) -> Operand:
    """Rows ``[n, *shape]``, by default uniform in (0.1, 0.9)."""
    return Operand(shape, False, make, dtype, grad and dtype.is_floating_point)


def shared(*shape: int, make=None, dtype=torch.float64, grad=True) -> Operand:
    """A parameter or constant ``[*shape]``."""
    return Operand(shape, True, make, dtype, grad and dtype.is_floating_point)


def signed(values: Tensor) -> Tensor:
    """From (0.1, 0.9) to both signs."""
    return (values - 0.5) * 4


@dataclass
class Sample:
    """A call of an op.

    Attributes:
        call: takes the operands, returns a tensor or a tuple of them.
        smooth: whether it has a gradient; tame: why real rows are not hostile, too; nothing if they are.
    """

    call: Callable
    operands: list[Operand] = field(default_factory=lambda: [rows(4, make=signed)])
    smooth: bool = True
    tame: str = ""

    @property
    def hostile(self) -> bool:
        """Whether it has real rows that are hostile in some turn."""
        return not self.tame and any(not each.shared and each.dtype.is_floating_point for each in self.operands)


def sample(call: Callable, *operands: Operand, **options) -> Sample:
    """A ``Sample``, by default of one operand ``[n, 4]`` of both signs."""
    return Sample(call, list(operands), **options) if operands else Sample(call, **options)


@contextlib.contextmanager
def awaited() -> Iterator[set[str]]:
    """What runs within, known once it is over, for which a host would wait for a GPU: no CUDA graph can hold it.

    Found by profiling: under a dispatch mode PyTorch computes some losses in other ways.
    """
    found: set[str] = set()
    with torch.autograd.profiler.profile() as profiled:
        yield found
    for event in profiled.function_events:
        if event.name in WAITING and (event.cpu_parent is None or event.cpu_parent.name not in ON_CPUS):
            found.add(event.name)


class Traced:
    """A sample as a captured graph, and its padded form for at most ``capacity`` rows."""

    def __init__(self, given: Sample, capacity: int | None = None):
        self.sample = given
        self.fits: list[Tensor] = []
        self.capacity = capacity or ROWS + padding_rows()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        mode.cache_enabled = False  # every call is another one: keeping results takes longer than making them

        def fake(shape: tuple, dtype: torch.dtype) -> Tensor:
            dims = [DimDynamic.DUCK if size == HINT else DimDynamic.STATIC for size in shape]
            context = StatelessSymbolicContext(dynamic_sizes=dims)
            return mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context)

        fakes = [fake((HINT,), torch.int64)]
        for operand in given.operands:
            shape = operand.shape if operand.shared else (HINT, *operand.shape)
            fakes.append(fake(shape, operand.dtype).requires_grad_(operand.grad))

        def run(seeds, *operands):
            result = given.call(*operands)
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)

        with mode, traced_losses():
            gm = make_fx(run, pre_dispatch=True)(*fakes)
        self.symbol = expression(fakes[0].shape[0])
        assert self.symbol is not None, "the sample can be traced for a single number of rows only"
        remove_in_place(gm)
        lower_batch_norm(gm)
        self.ops = {node.target._schema.name for node in gm.graph.nodes if hasattr(node.target, "_schema")}
        (output,) = gm.graph.find_nodes(op="output")
        self.outputs = [node.meta["val"] for node in output.args[0]]
        self.sizes = [[expression(size) for size in value.shape] for value in self.outputs]
        roles = [SEEDS, *[constant(None, "value")] * len(given.operands)]
        self.padded = pad(gm, roles, [], self.capacity)

    def exact(self, operands: list[Tensor]) -> list[Tensor]:
        """Outputs of the valid rows alone, by PyTorch itself."""
        result = self.sample.call(*operands)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def run(self, operands: list[Tensor], count: int = ROWS) -> list[Tensor]:
        """Outputs of the padded graph."""
        inputs = {"seeds": torch.zeros(self.capacity, dtype=torch.int64), "seed_count": torch.tensor(count)}
        inputs["flag"] = torch.tensor(False)
        given = iter(operands)
        values = [inputs[role.name] if role.name in inputs else next(given) for role in self.padded.roles]
        *outputs, _, ok = self.padded.gm(*values)
        self.fits.append(ok)
        return outputs

    def split(self, output: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """(valid part of an output, everything else, flat)."""
        valid = torch.ones(output.shape, dtype=torch.bool)
        part = output
        for dim, expr in enumerate(self.sizes[position]):
            if expr is not None:
                size = int(expr.subs(self.symbol, ROWS))
                shape = [-1 if d == dim else 1 for d in range(output.dim())]
                valid = valid & (torch.arange(output.shape[dim]) < size).view(shape)
                part = part.narrow(dim, 0, size)
        return part, output[~valid]


def padding_rows() -> int:
    """One padded row for every pair of hostile values, and some where they stand side by side."""
    return len(HOSTILE) * (len(HOSTILE) + 1)


def hostile_rows(operand: Operand, position: int, dtype: torch.dtype) -> Tensor:
    """Padded rows of the operand at ``position``: row (i, j) holds value i in the first operand, j in the second."""
    pairs = itertools.product(HOSTILE, HOSTILE)
    column = torch.tensor([pair[position % 2] for pair in pairs], dtype=torch.float64)
    width = max(1, int(torch.tensor(operand.shape).prod()) if operand.shape else 1)
    mixed = torch.tensor([[HOSTILE[(i + k * (position + 1)) % len(HOSTILE)] for k in range(width)]
                          for i in range(len(HOSTILE))], dtype=torch.float64)  # fmt: skip
    values = torch.cat([column[:, None].expand(-1, width), mixed]).reshape(-1, *operand.shape)
    if dtype is torch.bool:
        return values > 0
    return values.to(dtype) if dtype.is_floating_point else values.clamp(0, 1).to(dtype)


def real_rows(operand: Operand, position: int, turn: int, dtype: torch.dtype) -> Tensor:
    """Hostile real rows of the operand at ``position``: others hold other numbers, but for the last turns' column 0."""
    if turn >= UNIFORM:
        return hostile_rows(operand, position, dtype)[-len(HOSTILE) :][list(TURNS[turn])]
    numbers = torch.tensor([HOSTILE[i] for i in TURNS[(turn + position) % UNIFORM]], dtype=torch.float64).roll(position)
    return numbers.to(dtype).view(-1, *[1] * len(operand.shape)).expand(-1, *operand.shape)


def leaves(given: Sample, dtype: torch.dtype, turn: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """(operands of the valid rows, operands with hostile padding behind the same rows), in ``dtype`` if floating.

    With a ``turn``, the last valid rows are hostile, too.
    """
    plain, padded = [], []
    for position, operand in enumerate(given.operands):
        kind = dtype if operand.dtype.is_floating_point else operand.dtype
        valid = operand.valid(position).to(kind)
        if turn is not None and not operand.shared and kind.is_floating_point:
            hostile = real_rows(operand, position, turn, kind)
            valid = torch.cat([valid[: ROWS - len(hostile)], hostile])
        whole = valid if operand.shared else torch.cat([valid, hostile_rows(operand, position, kind)])
        plain.append(valid.clone().requires_grad_(operand.grad))
        padded.append(whole.clone().requires_grad_(operand.grad))
    return plain, padded


def check(given: Sample, dtype: torch.dtype, traced: Traced, turn: int | None = None) -> list[str]:
    """Differences between padded and exact, as sentences; none if all is well. Real rows are hostile in a ``turn``."""
    plain, padded = leaves(given, dtype, turn)
    once = dtype == torch.float64 and turn is None
    with awaited() if once else contextlib.nullcontext(set()) as waited:
        got = traced.run(padded)
    expected = traced.exact(plain)
    assert all(map(bool, traced.fits))
    parts = [traced.split(output, position) for position, output in enumerate(got)]
    wrong = [f"a CUDA graph cannot hold {name}" for name in sorted(waited)]
    for position, (exact, (valid, rest)) in enumerate(zip(expected, parts, strict=True)):
        wrong += _differences(f"output {position}", valid, exact, dtype)
        # where a hostile real row meets a padded column, the entry is as large as that row makes it
        beside = turn is not None and sum(size is not None for size in traced.sizes[position]) > 1
        if rest.is_floating_point() and not beside and not torch.isfinite(rest).all():
            wrong.append(f"output {position}: its padding is not finite")
    if not given.smooth:
        return wrong
    cotangents = [_cotangent(exact) for exact in expected]
    grads = _grads(expected, cotangents, plain)
    ours = _grads([valid for valid, _ in parts], cotangents, padded)
    for position, (operand, exact, grad) in enumerate(zip(given.operands, grads, ours, strict=True)):
        if exact is None:
            continue
        valid = grad if operand.shared else grad[:ROWS]
        wrong += _differences(f"gradient {position}", valid, exact, dtype)
        if not operand.shared and bool((grad[ROWS:] != 0).any()):
            wrong.append(f"gradient {position}: padded rows get {grad[ROWS:][grad[ROWS:] != 0][:3].tolist()}")
    return wrong


def _cotangent(value: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.rand(value.shape, generator=generator, dtype=torch.float64).sub(0.4).to(value.dtype)


def _grads(outputs: list[Tensor], cotangents: list[Tensor], operands: list[Tensor]) -> list[Tensor | None]:
    wanted = [operand for operand in operands if operand.requires_grad]
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], materialize_grads=True))
    return [next(found) if operand.requires_grad else None for operand in operands]


def _differences(what: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> list[str]:
    """Equal, also in which infinity it is, or that it is no number."""
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return [f"{what}: {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"]
    if not got.is_floating_point():
        return [] if torch.equal(got, expected) else [f"{what}: {got.flatten()[:4]}, expected {expected.flatten()[:4]}"]
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4}.get(dtype, 2e-2)
    close = torch.isclose(got, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    if close.all():
        return []
    return [f"{what}: {got[~close][:4].tolist()}, expected {expected[~close][:4].tolist()}"]
