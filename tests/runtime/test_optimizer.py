"""What a captured step holds on to of an optimizer, and when it is out of date; with kernels that run nowhere here."""

import collections

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close

from joestar.errors import JoestarWarning, OptimizerError
from joestar.ops import optimizer as kernels
from joestar.runtime.optimizer import SUPPORTED, SkippableOptimizer

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def captured(kind=torch.optim.Adam, model=None, **options):
    """An optimizer as on a GPU, after a capture."""
    model = model or torch.nn.Linear(3, 2)
    own = kind(model.parameters(), 0.1, **options)
    wrapped = SkippableOptimizer(own, model)
    wrapped.on_gpu = True
    wrapped.refresh()
    wrapped.hold()
    return model, own, wrapped


def regrouped(model, own):
    own.add_param_group({"params": [own.param_groups[0]["params"].pop()], "lr": 0.5})


def changed_moments(model, own):
    own.state[model.weight]["exp_avg"] = torch.zeros(2, 3)


CHANGES = {
    "nothing": (lambda model, own: None, True),
    "values": (lambda model, own: own.state[model.weight]["exp_avg"].add_(1), True),
    "learning rate": (lambda model, own: own.param_groups[0].update(lr=0.5, weight_decay=0.1, betas=(0.5, 0.6)), True),
    "parameters": (lambda model, own: model.load_state_dict(torch.nn.Linear(3, 2).state_dict()), True),
    "loaded": (lambda model, own: own.load_state_dict(torch.optim.Adam(model.parameters()).state_dict()), False),
    "cleared": (lambda model, own: own.state.clear(), False),
    "moments": (changed_moments, False),
    "storage": (lambda model, own: setattr(model.weight, "data", torch.zeros(2, 3)), False),
    "formula": (lambda model, own: own.param_groups[0].update(amsgrad=True), False),
    "group": (regrouped, False),
    "hook on gradients": (lambda model, own: model.weight.register_hook(torch.neg), False),
    "hook behind gradients": (lambda model, own: model.bias.register_post_accumulate_grad_hook(print), False),
    "hook come and gone": (lambda model, own: model.weight.register_hook(torch.neg).remove(), True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_captured_step_holds_on_to(change):
    model, own, wrapped = captured()
    apply, up_to_date = change
    apply(model, own)
    wrapped.refresh()
    assert wrapped.holds() is up_to_date


@pytest.mark.parametrize("change", CHANGES)
def test_the_quick_look_says_what_the_whole_one_says(change):
    """Behind steps in which nothing was assigned only what may have changed is looked at."""
    model, own, wrapped = captured()
    assert wrapped.refresh() and wrapped.refresh()
    assert wrapped._usual is not None and wrapped._usual.same(own)
    make, expected = CHANGES[change]
    make(model, own)
    assert wrapped.refresh() is expected
    assert wrapped._table[0, 0] == own.param_groups[0]["lr"]


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "swapped"])
def test_the_quick_look_sees_parameters(frozen):
    model, own, wrapped = captured()
    assert wrapped.refresh()
    before = wrapped.trained()
    if frozen:
        model.bias.requires_grad_(False)
    else:
        own.param_groups[0]["params"].reverse()
    assert not wrapped._usual.same(own)
    wrapped.refresh()
    assert wrapped._trained == wrapped.trained() != before


@pytest.mark.parametrize("name", ["lr", "betas"])
def test_numbers_that_are_tensors_are_read_in_every_step(name):
    """Also those within a tuple."""
    _, own, wrapped = captured()
    tensor = torch.tensor(0.9)
    own.param_groups[0][name] = tensor if name == "lr" else (tensor, 0.99)
    wrapped.refresh()
    tensor.fill_(0.5)
    wrapped.refresh()
    assert wrapped._usual is None and wrapped._table[0, 0 if name == "lr" else 3] == 0.5


def test_hooks_on_gradients_are_recorded():
    model, _, wrapped = captured()
    handle = model.weight.register_hook(torch.neg)
    with pytest.warns(JoestarWarning, match="only while it is recorded"):
        wrapped.hold()
    assert wrapped.holds()
    handle.remove()
    assert not wrapped.holds()


def test_parameters_that_are_added_must_be_the_models():
    _, own, wrapped = captured()
    own.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(OptimizerError, match=r"parameter 0 of group 1 \(shape \[2\]\) is not the model's"):
        wrapped.refresh()


def test_hyperparameters_go_to_the_table():
    _, own, wrapped = captured(torch.optim.AdamW, weight_decay=0.3)
    table = wrapped._table.clone()
    assert table[0, :5].tolist() == pytest.approx([0.1, 0.3, 1e-8, 0.9, 0.999])
    own.param_groups[0].update(lr=torch.tensor(0.25), betas=(0.5, 0.75))
    wrapped.refresh()
    assert wrapped._table[0].tolist() == pytest.approx(kernels.hyperparameters(own, own.param_groups[0]))
    assert wrapped._table[0, 0] == 0.25 and wrapped._table[0, 5:7].tolist() == [0.5, 0.25] and wrapped.holds()
    own.param_groups[0]["lr"].fill_(0.125)  # as schedulers do
    wrapped.refresh()
    assert wrapped._table[0, 0] == 0.125


def test_state_that_is_missing_is_allocated_and_counts_go_to_the_device():
    model, own, wrapped = captured()
    own.state.clear()
    own.state[model.bias]["step"] = 3.0
    wrapped.refresh()
    assert own.state[model.bias]["step"].item() == 3 and own.state[model.weight]["exp_avg"].shape == (2, 3)
    assert not wrapped.holds()


def thaw(model, own):
    model.bias.requires_grad_(True)


def load_counts(model, own):
    """A state of before the bias was trained, counts as numbers."""
    state = own.state_dict()
    for of_one in state["state"].values():
        of_one.update({name: float(of_one[name]) for name in ("step", "mu_product") if name in of_one})
    own.load_state_dict(state)


LATER = {
    "nothing": lambda model, own: None, "thawed": thaw, "cleared": lambda model, own: own.state.clear(),
    "loaded": load_counts, "amsgrad": lambda model, own: own.param_groups[0].update(amsgrad=True, centered=True),
    "momentum": lambda model, own: own.param_groups[0].update(momentum=0.9), "rate": CHANGES["learning rate"][0],
}  # fmt: skip


class Pair(torch.nn.Module):
    """Two matrices: Muon takes nothing else."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("first", LATER)
def test_nothing_of_the_state_is_missing_when_a_step_is_recorded(kind, first):
    """Whatever came before: the bias is frozen at first; behind each change come steps in which nothing changes."""
    for second in LATER:
        model = Pair()
        model.bias.requires_grad_(False)
        model, own, wrapped = captured(kind, model=model)
        assert wrapped.refresh()
        for change in (first, second):
            LATER[change](model, own)
            for _ in range(2):
                if not wrapped.refresh():
                    wrapped.hold()
                complete(own)


def complete(own):
    """Each trained parameter has what its formula reads, as tensors."""
    new = object.__new__(type(own))
    new.state, new.param_groups = collections.defaultdict(dict), own.param_groups
    kernels.allocate(new)
    for parameter, wanted in new.state.items():
        assert own.state[parameter].keys() >= wanted.keys()
        for name, value in wanted.items():
            found = own.state[parameter][name]
            assert isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("count", [3.0, torch.tensor(3.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_counts_that_are_loaded_are_beside_their_parameters(kind, count):
    """States have them on the CPU, as PyTorch's unfused ones; on a GPU a loop's own step is fused."""
    model, (_, saved, _) = torch.nn.Linear(3, 2, device="meta"), captured(kind)
    model.bias.requires_grad_(False)
    own = kind(model.parameters(), 0.1)
    SkippableOptimizer(own, model)
    saved.step()
    for state in saved.state.values():
        state["step"] = count
    own.load_state_dict(saved.state_dict())
    for parameter in model.parameters():
        assert own.state[parameter]["step"].device == parameter.device


def wrap_step(own):
    step = own.step
    own.step = lambda *args: step(*args)


CALLS = {
    "a hook": lambda own: own.register_step_pre_hook(lambda *_: None),
    "a hook behind": lambda own: own.register_step_post_hook(lambda *_: None),
    "a hook of all optimizers": lambda own: register_optimizer_step_pre_hook(lambda *_: None),
    "a hook behind all optimizers": lambda own: register_optimizer_step_post_hook(lambda *_: None),
    "another step": wrap_step,
}
"""What a GPU's step, which calls no Python, would leave out."""


@pytest.mark.parametrize("call", CALLS)
def test_what_a_step_on_a_gpu_does_not_call_is_refused(call):
    _, own, wrapped = captured()
    wrapped.on_gpu = True
    hook = CALLS[call](own)
    try:
        assert not wrapped.holds()
        for due in wrapped.refresh, wrapped.hold:
            with pytest.raises(OptimizerError, match=r"hooks on step\(\), or another step.*step it in your own loop"):
                due()
        wrapped.on_gpu = False
        wrapped.refresh()
    finally:
        if hook is not None:
            hook.remove()


def test_schedulers_may_wrap_steps():
    _, own, wrapped = captured()
    torch.optim.lr_scheduler.StepLR(own, 2)
    assert "step" in vars(own)
    wrapped.on_gpu = True
    wrapped.refresh()
    assert wrapped.holds()


def test_a_replaced_zero_grad_is_refused():
    _, own, wrapped = captured()
    own.zero_grad = lambda *args, **kwargs: None
    with pytest.raises(OptimizerError, match=r"zero_grad of the optimizer was replaced.*accumulate="):
        wrapped.refresh()


FORMS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "fused by the user": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "eps": 1e-3}),
    "NAdam": (torch.optim.NAdam, {"eps": 1e-3}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), FORMS.values(), ids=FORMS)
def test_steps_are_pytorchs_whatever_the_dtype(kind, options, dtype):
    """77 entries: vectors and a rest, which PyTorch's kernels treat apart."""
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 11, bias=False).to(dtype)
    plain = torch.nn.Parameter(model.weight.detach().double())
    wrapped = SkippableOptimizer(kind(model.parameters(), 0.1, **options), model)
    exact = kind([plain], 0.1, **{**options, "fused": None} if "fused" in options else options)
    for number in range(4):
        model.weight.grad = torch.randn(11, 7).to(dtype)
        if number == 2:
            before = model.weight.detach().clone()
            wrapped.step(torch.tensor(False))
            assert torch.equal(model.weight, before)
            continue
        plain.grad = model.weight.grad.double()
        wrapped.step(torch.tensor(True))
        exact.step()
    assert_close(model.weight.double(), plain, rtol=0, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_complex_parameters(kind):
    """Fused forms do not take them; kernels on a GPU would take them for something else."""
    model, plain = torch.nn.Module(), torch.nn.Parameter(torch.full((5,), 1 + 2j))
    model.weight = torch.nn.Parameter(plain.detach().clone())
    wrapped, exact = SkippableOptimizer(kind(model.parameters(), 0.1), model), kind([plain], 0.1)
    for number in range(3):
        plain.grad = model.weight.grad = torch.randn(5, dtype=torch.complex64) * 1j**number
        wrapped.step(torch.tensor(True))
        exact.step()
    assert_close(model.weight, plain)
    wrapped.on_gpu = True
    with pytest.raises(OptimizerError, match="view_as_complex"):
        wrapped.refresh()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_another_step_is_called_on_a_cpu(kind):
    model = torch.nn.Linear(3, 2)
    own = kind(model.parameters(), lr=0.1)
    step, calls = own.step, []
    own.step = lambda *args: (calls.append(1), step(*args))
    wrapped = SkippableOptimizer(own, model)
    wrapped.refresh()
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    wrapped.step(torch.tensor(True))
    assert calls == [1] and not torch.equal(model.weight, before)
