"""The formulas that run on a GPU against ``torch.optim`` itself, in float64, with skipped steps and changing rates."""

import copy

import pytest
import torch
from torch import optim

from joestar.ops import optimizer as kernels
from joestar.ops.optimizer_formulas import FORMULAS
from joestar.runtime.optimizer import SkippableOptimizer

CASES = {
    "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "RMSprop-all": lambda p: optim.RMSprop(
        p, 0.01, alpha=0.9, weight_decay=0.1, momentum=0.8, centered=True, maximize=True
    ),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "NAdam-all": lambda p: optim.NAdam(p, 0.01, (0.8, 0.95), weight_decay=0.1, momentum_decay=0.01, maximize=True),
    "NAdam-decoupled": lambda p: optim.NAdam(p, 0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "RAdam-all": lambda p: optim.RAdam(
        p, 0.01, (0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "RAdam-decay": lambda p: optim.RAdam(p, 0.01, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1),
    "Adagrad-all": lambda p: optim.Adagrad(p, 0.1, 0.05, 0.1, initial_accumulator_value=0.3, maximize=True),
    "groups": lambda p: optim.NAdam([{"params": p[:1], "lr": 0.5}, {"params": p[1:], "weight_decay": 0.2}], 0.01),
}
if hasattr(optim, "Muon"):
    CASES["Muon"] = lambda p: optim.Muon([p[0], p[2]], 0.02)
    CASES["Muon-all"] = lambda p: optim.Muon([p[0], p[2]], 0.02, 0.2, 0.5, False, adjust_lr_fn="match_rms_adamw")


def parameters(dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3), (5,), (2, 7), (), (4,))
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]
    made[-1].requires_grad_(False)
    return made


def test_every_formula_has_a_case():
    assert {kind.__name__ for kind in FORMULAS} == {name.split("-")[0] for name in CASES} - {"groups"}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_as_torch_optim(make):
    """Parameters and state after twelve steps; between them, steps with gradients of NaN that are skipped."""
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    own, reference = make(ours), make(theirs)
    kernels.allocate(own)
    generator, yes = torch.Generator().manual_seed(1), torch.tensor(True)
    for step in range(12):
        for mine, other in zip(ours[:4], theirs[:4], strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
            other.grad = mine.grad.clone()
        ours[1].grad = theirs[1].grad = None  # one that the model does not use
        for group, same in zip(own.param_groups, reference.param_groups, strict=True):
            group["lr"] = same["lr"] = same["lr"] * 0.9
        table = torch.tensor([kernels.hyperparameters(own, g) for g in own.param_groups], dtype=torch.float64)
        if step % 3 == 1:
            kept = [p.grad for p in ours]
            for parameter in ours:
                parameter.grad = None if parameter.grad is None else parameter.grad * torch.nan
            kernels.step(own, table, ~yes)
            for parameter, grad in zip(ours, kept, strict=True):
                parameter.grad = grad
        kernels.step(own, table, yes)
        reference.step()
    muon = isinstance(own, getattr(optim, "Muon", ()))
    loose = 1.0 if muon else 1e-6  # it works in bfloat16; other optimizers' scalars are float32
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=loose * 1e-3, atol=loose * 1e-3)
        for name, value in reference.state.get(other, {}).items():
            torch.testing.assert_close(own.state[mine][name], value, rtol=1e-6, atol=1e-6, msg=name)


PLAIN = {**CASES, "Adam": lambda p: optim.Adam(p), "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9)}
FLAGS = {
    "AdamW foreach": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "AdamW capturable": lambda p: optim.AdamW(p, 0.01, capturable=True),
    "AdamW plain": lambda p: optim.AdamW(p, 0.01),
    "SGD foreach": lambda p: optim.SGD(p, 0.1, 0.9, foreach=True),
    "NAdam foreach": lambda p: optim.NAdam(p, 0.01, foreach=True),
}


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(parameters(torch.float64))


@pytest.mark.parametrize("make", [*PLAIN.values(), *FLAGS.values()], ids=[*PLAIN, *FLAGS])
def test_every_one_is_accepted_and_equal_on_a_cpu(make):
    """Whatever flags it was made with; and its state dict is that of one that nobody took over."""
    ours, theirs = Holder(), Holder()
    own = make(list(ours.parts))
    plain = {"capturable": False} if own.param_groups[0].get("capturable") else {}
    reference = make(list(theirs.parts))
    for group in reference.param_groups:
        group.update(plain)  # torch's own runs so on accelerators only
    wrapped, generator = SkippableOptimizer(own, ours), torch.Generator().manual_seed(1)
    for step in range(6):
        for mine, other in zip(ours.parts[:4], theirs.parts[:4], strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
            other.grad = mine.grad.clone()
        if step == 3:  # load and go on
            own.load_state_dict(copy.deepcopy(own.state_dict()))
        wrapped.step(torch.tensor(True))
        before = [p.detach().clone() for p in ours.parts]
        wrapped.step(torch.tensor(False))
        assert all(torch.equal(p, q) for p, q in zip(ours.parts, before, strict=True))
        reference.step()
    for mine, other in zip(ours.parts, theirs.parts, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
    saved, expected = own.state_dict(), reference.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert saved["state"][index].keys() == state.keys()
    wrapped.reset()
    for parameter in ours.parts[:4]:
        parameter.grad = torch.ones_like(parameter)
    wrapped.step(torch.tensor(True))  # as a new one
