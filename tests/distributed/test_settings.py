"""What ranks compare of their scripts: every setting that a program may be traced with, and nothing else."""

import functools
import io
import itertools

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from joestar.cli.several import joined
from joestar.distributed.board import differences
from joestar.errors import ConfigError
from joestar.runtime.settings import Settings


class _Layer(nn.Module):
    """Settings of all kinds."""

    def __init__(self, **given):
        super().__init__()
        self.drop = nn.Dropout(given.get("p", 0.5))
        self.norm = given.get("norm", nn.BatchNorm1d)(4, eps=given.get("eps", 1e-5))
        self.shape = given.get("shape", [1, (2, "x")])
        self.names = given.get("names", {"b", "a"})
        self.own = given.get("own", {"scale": 2.0})
        self.device = given.get("device", torch.device("cpu"))
        self.table = given.get("table", torch.arange(3))
        self.act = given.get("act", torch.relu)
        self.best = given.get("best", 0.0)

    def forward(self, x):
        """Reads all but ``best``."""
        x = self.act(self.norm(self.drop(x)))
        return x.to(self.device) * self.own["scale"], self.shape, self.names, self.table


def _loss(factor):
    return lambda out, y: (out - y).sum() * factor


def _texts(loss=1.0, **given) -> dict[str, str]:
    torch.manual_seed(0)
    return Settings(_Layer(**given), {"loss": _loss(loss)}).texts()


OTHERS = {
    "model.drop.p": {"p": 0.25},
    "type(model.norm)": {"norm": nn.SyncBatchNorm},
    "model.norm.eps": {"eps": 1e-3},
    "model.shape[1]": {"shape": [1, (2, "y")]},
    "model.names": {"names": {"b", "c"}},
    "model.own['scale']": {"own": {"scale": 3.0}},
    "model.table": {"table": torch.arange(3) + 1},
    "model.act": {"act": torch.tanh},
    "loss's factor": {"loss": 2.0},
}


def test_two_that_are_built_alike_are_alike():
    """Their tensors lie elsewhere, on the device of each, and what nobody reads may differ."""
    given = {"device": torch.device("cuda:0")}, {"device": torch.device("cuda:1"), "best": 0.9}
    assert differences([_texts(**each) for each in given]) == []
    assert not any(" at 0x" in text for text in _texts().values())


@pytest.mark.parametrize("name", OTHERS)
def test_every_setting_that_differs_is_a_difference(name):
    lines = differences([_texts(), _texts(**OTHERS[name])])
    assert any(line.startswith(f"{name}: ") for line in lines), lines


class _Trainer:
    """What scripts often have: a loss beside things that are one rank's alone."""

    def __init__(self, rank: int, factor: float, smoothing: float):
        self.rank, self.factor, self.smoothing = rank, factor, smoothing
        self.writer = io.StringIO() if rank == 0 else None

    def log(self, value):
        """Rank 0 writes."""
        if self.rank == 0:
            self.writer.write(f"{value} {RANK}")

    def loss(self, out, y):
        """A loss, some of it in another method."""
        return self.factor * self._smoothed(out, y)

    def _smoothed(self, out, y):
        return F.cross_entropy(out, y, label_smoothing=self.smoothing)


RANK = 0


class _Logging(nn.Linear):
    """The same for a model."""

    def __init__(self, rank: int):
        super().__init__(2, 2)
        self.rank = rank

    def log(self):
        """Not part of the forward pass."""
        print(self.rank)


def test_what_only_other_methods_read_is_a_rank_s_own(monkeypatch):
    def texts(rank, factor=1.0, smoothing=0.1):
        monkeypatch.setitem(globals(), "RANK", rank)
        return Settings(_Logging(rank), {"loss": _Trainer(rank, factor, smoothing).loss}).texts()

    assert differences([texts(0), texts(1)]) == []
    assert differences([texts(0), texts(1, factor=2.0)]) == ["loss[1].factor: 1.0 on rank 0, 2.0 on rank 1"]
    assert differences([texts(0), texts(1, smoothing=0.0)]) == ["loss[1].smoothing: 0.1 on rank 0, 0.0 on rank 1"]


class _Base(_Logging):
    """A forward pass that others extend; its parts are called from here alone."""

    def __init__(self, rank: int, scale: float = 1.0):
        super().__init__(rank)
        self.scale = scale

    def forward(self, x):
        return self._scaled(super().forward(x))

    def _scaled(self, x):
        return x * self.scale


class _Extended(_Base):
    def forward(self, x):
        return super().forward(x)


class _ExtendedTwice(_Extended):
    def forward(self, x):
        return _Base.forward(self, x) + 1

    def _scaled(self, x):
        return super()._scaled(x)


@pytest.mark.parametrize("kind", [_Base, _Extended, _ExtendedTwice])
def test_what_an_overridden_method_reads_counts(kind):
    def texts(rank, scale):
        return Settings(kind(rank, scale), {}).texts()

    assert differences([texts(0, 1.0), texts(1, 1.0)]) == []
    assert differences([texts(0, 1.0), texts(1, 2.0)]) == ["model.scale: 1.0 on rank 0, 2.0 on rank 1"]


FACTOR = 1.0


class _Parts(nn.Module):
    """Methods of which every subclass calls another."""

    def _plain(self, x):
        return x

    def _scaled(self, x):
        return x * FACTOR


class _CallsPlain(_Parts):
    def forward(self, x):
        return self._plain(x)


class _CallsScaled(_Parts):
    def forward(self, x):
        return self._scaled(x)


def test_methods_of_a_base_count_for_every_subclass(monkeypatch):
    def texts(factor, *kinds):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        return Settings(nn.Sequential(*(kind() for kind in kinds)), {}).texts()

    assert differences([texts(each, _CallsPlain) for each in (1.0, 2.0)]) == []
    for kinds in [(_CallsScaled, _CallsPlain), (_CallsPlain, _CallsScaled)]:
        (line,) = differences([texts(each, *kinds) for each in (1.0, 2.0)])
        assert line.endswith("FACTOR: 1.0 on rank 0, 2.0 on rank 1")


class _Hook:
    """A hook that is an object, or a method of one."""

    def __init__(self, factor: float, rank: int):
        self.factor, self.rank = factor, rank

    def __call__(self, module, args, out):
        return out * self.factor

    def method(self, module, args, out):
        return out * self.factor

    def log(self):
        """Not part of the forward pass."""
        print(self.rank)


def _global_hook(module, args, out):
    return out * FACTOR


def _reading_hook(module, args, out):
    return out * module.best


def _hooked(hook, factor: float, rank: int) -> nn.Module:
    """A model whose hook's factor is in a closure, a default, ..."""
    model = nn.Sequential(_Logging(rank))
    model[0].best = factor if hook.startswith("attribute") else rank
    hooks = {
        "closure": lambda module, args, out: out * factor,
        "default": lambda module, args, out, by=factor: out * by,
        "object": _Hook(factor, rank),
        "method": _Hook(factor, rank).method,
        "partial": functools.partial(lambda by, module, args, out: out * by, factor),
        "global": _global_hook,
        "attribute": _reading_hook,
        "attribute, partial": functools.partial(_reading_hook),
    }
    model[0].register_forward_hook(hooks[hook])
    return model


HOOKS = ["closure", "default", "object", "method", "partial", "global", "attribute", "attribute, partial"]


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_reads_counts(hook, monkeypatch):
    def texts(rank, factor):
        monkeypatch.setitem(globals(), "FACTOR", factor if hook == "global" else 1.0)
        return Settings(_hooked(hook, factor, rank), {}).texts()

    assert differences([texts(0, 1.0), texts(1, 1.0)]) == []
    (line,) = differences([texts(0, 1.0), texts(1, 2.0)])
    assert line.replace("(", "").replace(")", "").endswith(": 1.0 on rank 0, 2.0 on rank 1")


def test_functions_differ_by_their_code():
    losses = (lambda out, y: 1 * out, lambda out, y: 2 * out, lambda out, y: out * 2)
    texts = [Settings(nn.Identity(), {"loss": loss}).texts() for loss in losses]
    for one, other in itertools.combinations(texts, 2):
        assert [line.partition(":")[0] for line in differences([one, other])] == ["loss"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_one_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with (
        pytest.raises(ConfigError, match="--gpus 1 wants a GPU, and PyTorch"),
        joined(None, "auto", True),
    ):
        pass
    console = Console()
    with joined(console, "auto", False) as own:
        assert own is console
