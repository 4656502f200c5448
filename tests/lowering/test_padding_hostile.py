"""Every op that has a rule, with hostile numbers in padded slots and in real rows: padded equals exact."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from joestar.lowering.rules import RULES
from joestar.lowering.rules.pointwise_ops import POINTWISE, PRODUCTS, SINGULAR

from .harness import NEWER, OLDER
from .hostile import HOSTILE, TURNS, UNIFORM, Sample, Traced, check, leaves, real_rows, rows, sample, shared, signed
from .losses import LOSSES
from .samples import EXPLAINED, OF_INTEGERS, SAMPLES

EVERY = {**SAMPLES, **LOSSES}


def differences(name: str, given: list[Sample], dtypes=(torch.float64, torch.float32)) -> list[str]:
    """What is wrong with the padded forms of an op's samples; nothing, one hopes."""
    wrong, met = [], False
    for number, each in enumerate(given):
        traced = Traced(each)
        met = met or f"aten::{name}" in traced.ops or name == "batch_norm"
        for dtype in dtypes:
            for turn in (None, *range(len(TURNS) if each.hostile else 0)):
                where = f"{name}, sample {number}, {dtype}, hostile rows {turn}"
                wrong += [f"{where}: {difference}" for difference in check(each, dtype, traced, turn)]
    return wrong if met else [*wrong, f"no sample of {name} calls aten.{name}"]


def test_every_rule_has_samples():
    names = RULES.keys() | POINTWISE | SINGULAR.keys() | PRODUCTS.keys()
    missing = names - EVERY.keys() - EXPLAINED.keys()
    assert not missing, f"rules without samples in samples.py, or a reason why they have none: {sorted(missing)}"
    assert not EXPLAINED.keys() & EVERY.keys()


def test_every_op_has_hostile_real_rows():
    """In one sample at least; the others say why they have none."""
    tame = {name for name, given in EVERY.items() if not any(each.hostile for each in given)}
    assert tame == OF_INTEGERS, "samples whose real rows are tame, or ops that are not named any more"
    for position in range(2):
        held = [real_rows(rows(4), position, turn, torch.float64) for turn in range(UNIFORM)]
        assert sorted(torch.cat(held)[:, 0].tolist()) == sorted(HOSTILE)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.fuzz)], ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=NEWER) if n in ("quantile", "nanquantile") else n for n in sorted(EVERY)]
)
def test_op(name, dtype):
    wrong = differences(name, EVERY[name], (dtype,))
    assert not wrong, "\n".join(wrong)


def unknown() -> list[str]:
    """PyTorch's pointwise functions of one tensor that no table here names."""
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = []
    for name in sorted(names - EVERY.keys() - EXPLAINED.keys()):
        op = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if op is None or torch.Tag.pointwise not in op.tags or name.startswith("_") or op._schema.is_mutable:
            continue
        needed = [argument for argument in op._schema.arguments if not argument.has_default_value()]
        if len(needed) == 1 and str(needed[0].type) == "Tensor":
            found.append(name)
    return found


def test_unknown_pointwise_ops_are_kept_from_padding():
    """Of an op that no table knows, padded operands are replaced: it may be as steep as it likes."""
    wrong, names = [], unknown()
    assert {"special_erfcx", "special_log_ndtr"} <= set(names)
    for name in names:
        op = getattr(torch.ops.aten, name)
        try:
            x = torch.full((2,), 0.3, dtype=torch.float64, requires_grad=True)
            op(x).sum().backward()
            smooth = x.grad is not None
        except RuntimeError:
            smooth = False  # of complex numbers or integers only, or without a derivative
        try:
            op(torch.full((2,), 0.3))
        except (RuntimeError, NotImplementedError):
            continue
        wrong += differences(name, [sample(lambda x, op=op: op(x), rows(4), smooth=smooth)])
    assert not wrong, "\n".join(wrong)


STEPS = {
    "exp": lambda x, y: (x * 0.3).exp(), "mul": lambda x, y: x * y, "square": lambda x, y: x * x,
    "div": lambda x, y: x / (y.abs() + 0.1), "log": lambda x, y: (x.abs() + 0.1).log(), "cube": lambda x, y: x**3,
    "cosh": lambda x, y: x.cosh() * 0.1, "sqrt": lambda x, y: (x.abs() + 0.1).sqrt(), "sub": lambda x, y: x - y,
    "gelu": lambda x, y: F.gelu(x, approximate="tanh"), "scaled": lambda x, y: x * 30,
    "softmax": lambda x, y: x.softmax(1),
    "unit": lambda x, y: x / x.norm(dim=1, keepdim=True), "layer norm": lambda x, y: F.layer_norm(x, (4,)),
    "mean of all": lambda x, y: x - x.mean(0), "deviation": lambda x, y: x / (x.std(0) + 0.1),
    "gate": lambda x, y: x * y.sigmoid(),
    "norm": lambda x, y: x.norm(dim=1, keepdim=True) + y, "power": lambda x, y: (x.abs() + 0.1) ** y.tanh(),
    "dots": lambda x, y: x * (x * y).sum(1, keepdim=True), "gram": lambda x, y: x @ (y.T @ x).tanh(),
}  # fmt: skip


def chain(seed: int):
    """Eight random steps on two sets of rows, then a product with weights."""
    draw = random.Random(seed)
    names = draw.choices(sorted(STEPS), k=8)

    def run(x, y, w):
        for name in names:
            x, y = y, STEPS[name](x, y)
        return (x + y) @ w

    return run, " ".join(names)


@pytest.mark.parametrize("first", [0, pytest.param(12, marks=pytest.mark.fuzz)])
def test_chains(first):
    """What one op leaves in the padding is what the next one gets."""
    chains, wrong, finite = [chain(seed) for seed in range(first, first + 12)], [], 0
    operands = rows(4, make=signed), rows(4), shared(4, 3)
    traced = Traced(sample(lambda x, y, w: tuple(run(x, y, w) for run, _ in chains), *operands))
    for position, (run, names) in enumerate(chains):
        one = copy.copy(traced)
        one.sample = sample(run, *operands)
        one.sizes = [traced.sizes[position]]
        one.run = lambda leaves, position=position: [traced.run(leaves)[position]]
        for dtype in (torch.float64, torch.float32):
            value = run(*leaves(one.sample, dtype)[0])
            if value.isfinite().all() and value.abs().max() < 1e4:
                finite += 1
                wrong += [f"{names} in {dtype}: {difference}" for difference in check(one.sample, dtype, one)]
    assert finite >= len(chains), "too few chains stay finite in true rows"
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_inductor():
    """What Inductor makes of the ops of one operand, in one compilation: its own decompositions, fused with guards."""
    names = [name for name in sorted(POINTWISE) if len(EVERY[name]) == 1 and len(EVERY[name][0].operands) == 1]
    ops = {name: EVERY[name][0] for name in names if EVERY[name][0].smooth and EVERY[name][0].operands[0] == rows(4)}
    for name in ("arcsinh", "asinh") if OLDER else ():  # of rows of 1e30 Inductor's was infinite before PyTorch 2.13
        del ops[name]
    assert len(ops) > 40
    together = sample(lambda x: tuple(each.call(x) for each in ops.values()), rows(4))
    traced = Traced(together)
    assert not check(together, torch.float32, traced)
    traced.padded.gm = torch.compile(traced.padded.gm, backend="inductor", dynamic=False)
    assert not check(together, torch.float32, traced)
