"""Every C++ kernel against its PyTorch reference, over the whole database."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from joestar import _native
from joestar.kernels import cpu
from joestar.ops import reference, registry

from .database import BIG_KEY, FLOATS, IDS, KEY, OPS, TOLERANCE

IDS_OF = {None: IDS, torch.float32: IDS, torch.float64: IDS[1:], torch.bfloat16: IDS[:1], torch.float16: IDS[1:]}
"""Id dtypes that a value dtype is tested with: both where it matters, one elsewhere, to save time."""
MANY = ("weighted_sample", "sample_aggregate", "sample_eids", "sample_cols", "rowwise_sample")
"""Ops with many samples whose references take long: `make test` takes all of them for one dtype only."""


def _case_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _cases():
    for name, op in OPS.items():
        kinds = [(dtype, ids) for dtype in (FLOATS if op.floats else (None,)) for ids in IDS_OF[dtype]]
        for number, (dtype, ids) in enumerate(kinds):
            if name in MANY and number and dtype is not torch.float32:
                yield pytest.param(name, dtype, ids, 5, id=f"{name}-{_case_id(dtype)}-{_case_id(ids)}-some")
            seldom = (name in MANY and number) or (dtype, ids) == (torch.float32, torch.int64)
            marks = pytest.mark.fuzz if seldom else ()
            yield pytest.param(name, dtype, ids, 1, id=f"{name}-{_case_id(dtype)}-{_case_id(ids)}", marks=marks)


def _double(args):
    """Every float tensor in ``args`` as float64."""
    return tree_map(lambda a: a.double() if isinstance(a, Tensor) and a.is_floating_point() else a, args)


def _tensors(result) -> list[Tensor]:
    """The outputs of a kernel, without the gradient that is ``None``."""
    return [value for value in (result if isinstance(result, (tuple, list)) else (result,)) if value is not None]


def check_equal(ours: Tensor, expected: Tensor, case: str) -> None:
    """Same shape, dtype and bits (-0 and 0 count as equal)."""
    assert ours.dtype == expected.dtype, f"{case}: {ours.dtype}, expected {expected.dtype}"
    assert ours.shape == expected.shape, f"{case}: {ours.shape}, expected {expected.shape}"
    assert torch.equal(ours, expected), f"{case}:\n{ours}\nexpected\n{expected}"


def check_close(ours: Tensor, exact: Tensor, dtype: torch.dtype, case: str) -> None:
    """Within the dtype's tolerance of a float64 result."""
    assert ours.shape == exact.shape, f"{case}: {ours.shape}, expected {exact.shape}"
    if not exact.is_floating_point():
        return check_equal(ours, exact, case)
    assert ours.dtype == dtype, f"{case}: {ours.dtype}, expected {dtype}"
    assert torch.isfinite(ours).all(), f"{case}: not finite:\n{ours}"
    error = (ours.double() - exact).abs().max().item() if ours.numel() else 0.0
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    assert error <= TOLERANCE[dtype] * scale, f"{case}: error {error:.3g} at values up to {scale:.3g}"
    return None


def test_every_kernel_has_samples_and_every_op_a_test():
    """Ops that run as their references on a CPU are called in a test of their own; compositions in those of padding."""
    with_tests_of_their_own = {"gather_rows", "multi_aggregate", "multi_aggregate_grad"}
    assert set(OPS) == set(cpu.__all__) - with_tests_of_their_own
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    called = set(re.findall(r"\b(?:ops|joestar|JOESTAR|gpu|reference|whose)\.(\w+)", tests))
    ours = (op for op in registry.OPS.values() if op.reference.__module__.startswith("joestar."))  # no page's example
    whole = {op.name for op in ours if op.fake is not None}
    missing = {name for name in whole - set(OPS) - called if name.partition("_grad")[0] not in called}
    assert not missing, f"ops without samples in a database_*.py and without a test: {sorted(missing)}"


@pytest.mark.parametrize(("name", "dtype", "ids", "every"), list(_cases()))
@pytest.mark.each("name")
def test_kernel_against_reference(name, dtype, ids, every, poisoned):
    """Every third time the reference, which runs on devices without a kernel, is held against itself in float64."""
    kernel, truth = getattr(cpu, name), getattr(reference, name)
    for number, sample in enumerate(itertools.islice(OPS[name].samples(dtype, ids), None, None, every)):
        found, case = [_tensors(kernel(*sample.args))], f"{name}: {sample.case}"
        if sample.exact:
            same = _tensors(truth(*sample.args))
            for value, expected in zip(found[0], same, strict=True):
                check_equal(value, expected, case)
            found = [same] if dtype is not None and number % 3 == 0 else []
        elif number % 3 == 0:
            found.append(_tensors(truth(*sample.args)))
        exact = _tensors(truth(*_double(sample.args))) if found else []
        for values in found:
            for i, (value, expected) in enumerate(zip(values, exact, strict=True)):
                check_close(value, expected, OPS[name].result_dtype(i, dtype, sample.args), case)


@pytest.mark.parametrize("name", OPS)
def test_bits_do_not_depend_on_the_number_of_threads(name, poisoned):
    kernel = getattr(cpu, name)
    args = OPS[name].large(torch.float32)
    alone = _tensors(kernel(*args))
    for ours, expected in zip(alone, _tensors(getattr(reference, name)(*_double(args))), strict=True):
        check_close(ours, expected, torch.float32, name)
    for threads in (2, 16):
        _native.set_num_threads(threads)
        for ours, expected in zip(_tensors(kernel(*args)), alone, strict=True):
            check_equal(ours, expected, f"{name} with {threads} threads")


def _strided(value):
    """The same tensor in another layout: rows interleaved, or dimensions permuted in memory. Keys stay whole."""
    if not isinstance(value, Tensor) or value.dim() == 0 or value is KEY or value is BIG_KEY:
        return value
    if value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack([value, value], 1)[:, 0]


def _some(samples, most: int) -> list:
    """Up to so many of the samples whose shapes do not depend on data, spread over them: two at least."""
    fixed = [s for s in samples if not (type(s.args[-1]) is int and s.args[-1] == -1)]
    return (fixed if len(fixed) > 1 else 2 * fixed)[:: -(-len(fixed) // most)]


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
@pytest.mark.parametrize(
    ("layout", "most"),
    [
        pytest.param(lambda a: a, 60, marks=pytest.mark.fuzz, id="contiguous"),
        pytest.param(_strided, 60, marks=pytest.mark.fuzz, id="strided, more"),
        pytest.param(_strided, 10, id="strided"),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_shapes_dtypes_and_strides_under_tracing(name, layout, most):
    """Traced code relies on the fake kernels: both implementations keep to them, for any layout of the inputs."""
    op, mode = getattr(torch.ops.joestar, name), FakeTensorMode()
    dtype = torch.bfloat16 if OPS[name].floats else None
    for sample in _some(OPS[name].samples(dtype, torch.int32), most):
        args = tree_map(layout, sample.args)
        with mode:
            fakes = _tensors(op(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, args)))
        plain = _tensors(getattr(cpu, name)(*sample.args))
        for implementation in (cpu, reference):
            results = zip(_tensors(getattr(implementation, name)(*args)), fakes, plain, strict=False)
            for i, (ours, fake, expected) in enumerate(results):
                case = f"{implementation.__name__} {name}: {sample.case}"
                assert (ours.shape, ours.dtype) == (fake.shape, fake.dtype), case
                assert ours.numel() < 2 or ours.stride() == fake.stride(), case
                check_close(ours, _double(expected), OPS[name].result_dtype(i, dtype, sample.args), case)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.errors])
def test_errors(name):
    for args, message in OPS[name].errors:
        with pytest.raises(ValueError, match=message):
            getattr(torch.ops.joestar, name)(*args)


def test_every_kernel_refuses_offsets_of_another_dtype():
    for name, op in OPS.items():
        args = list(next(op.samples(torch.float32, torch.int64)).args)
        if name in ("compact", "spmm_coo", "dropout_bits", "dropout_apply", "relu_dropout_grad", "bias_relu",
                    "bias_relu_grad"):  # fmt: skip
            continue  # the offsets are read on the Python side, as integers; there are none
        args[0] = args[0].to(torch.int32)
        with pytest.raises(ValueError, match="indptr int64"):
            getattr(cpu, name)(*args)


def test_mixed_dtypes_follow_promotion():
    indptr, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1])
    low, high = torch.tensor([[1.5], [2.0]], dtype=torch.bfloat16), torch.tensor([[3.0], [5.0]])
    ops = torch.ops.joestar
    calls = [(ops.sddmm, (indptr, indices, a, b, op)) for a, b in ((low, high), (high, low)) for op in ("mul", "dot")]
    calls.append((ops.spmm, (indptr, indices, low, torch.tensor([0.1, 0.2, 0.3]), "sum")))
    for op, args in calls:
        with FakeTensorMode() as mode:
            fake = op(*tree_map(lambda a, mode=mode: mode.from_tensor(a) if isinstance(a, Tensor) else a, args))
        name = op._qualified_op_name.removeprefix("joestar::")
        for implementation in (cpu, reference):
            ours = getattr(implementation, name)(*args)
            assert ours.dtype == fake.dtype, (name, implementation)
            exact = getattr(reference, name)(*_double(args))
            check_close(ours, exact, ours.dtype, name)
