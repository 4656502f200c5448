"""What ``functools`` keeps - results of cached functions and methods, cached properties - is what Python has; and what
modules, functions, classes and slots do not have is noticed when it comes.

TorchDynamo traces what a cached function wraps, and leaves no guard where a module or a function has no such attribute.
"""

import functools
import gc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import ChangedAfterCompileError
from tests.runtime.common import CLASSES, Reading, planted_graph

IDX = torch.arange(60)
GAINS = {"a": 1.5}
CALLS = []


class Config:
    def __init__(self):
        self.scale = 1.0


@functools.lru_cache
def get_config():
    return Config()


@functools.cache
def config_of(name, *, kind="plain"):
    return Config()


@functools.cache
def inner():
    return get_config()


@functools.cache
def table(n):
    return torch.ones(n, dtype=torch.float64)


@functools.cache
def noise(n):
    return torch.rand(n, dtype=torch.float64)


@functools.cache
def counted():
    CALLS.append(1)
    return float(len(CALLS))


@functools.cache
def gain(name):
    return GAINS[name]


@functools.lru_cache(maxsize=1)
def small(n):
    return torch.full((CLASSES,), float(n), dtype=torch.float64)


@functools.lru_cache(maxsize=0)
def never(n):
    return torch.full((CLASSES,), float(n), dtype=torch.float64)


@functools.cache
def missing(name):
    raise KeyError(name)


def without():
    try:
        return missing("a")
    except KeyError:
        return 0.5


@functools.cache
def of_rows(h):
    return (h + 2.0).amax()


class Registry:
    @staticmethod
    @functools.cache
    def get(name):
        return Config()

    @functools.cached_property
    def scale(self):
        return 2.0 * self.base

    @functools.lru_cache  # noqa: B019
    def times(self, n):
        return self.base * n

    def reads_itself(self):
        return self.times(3)

    def __init__(self, base=0.5):
        self.base = base


REGISTRY = Registry()
SETTINGS, EMPTY, TRIED = (types.ModuleType(name) for name in ("settings", "empty", "tried"))


def helper(x):
    return x


def other(x):
    return x


class Slots:
    __slots__ = ("scale",)


class Bare:
    pass


SLOTS = Slots()


def tried(thing):
    try:
        return thing.scale
    except AttributeError:
        return 1.0


def scale_of(thing, name="scale"):
    return getattr(thing, name, 1.0)


class OfRows(Reading):
    """Calls a cached function with what it computes."""

    def forward(self, blocks, x):
        h = super().forward(blocks, x)
        return h * of_rows(0 * h.detach())


def compiled(*read, kind=Reading):
    """A step of a model that reads, over all neighbours, and what plain PyTorch gives for ``IDX``."""
    torch.manual_seed(0)
    model, graph = kind(*read), planted_graph(nodes=500, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sampler = joestar.NeighborSampler(graph, [-1])
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", warm_up=2)

    def plain() -> float:
        return float(F.cross_entropy(model([graph], graph.ndata["x"])[IDX], graph.ndata["y"][IDX]))

    return step, plain


def follows(step, plain) -> None:
    assert float(step(IDX)) == pytest.approx(plain(), rel=1e-12)


def forget() -> None:
    for cached in (get_config, config_of, inner, table, noise, counted, gain, small, missing, of_rows, Registry.get):
        cached.cache_clear()
    CALLS.clear()


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


KEPT = {
    "an object": (
        lambda: get_config().scale, lambda: setattr(get_config(), "scale", 2.0),
        lambda: setattr(get_config(), "scale", 3.0), r"get_config\(\).scale was 2.0",
    ),
    "by arguments": (
        lambda: config_of("a", kind="b").scale + config_of("c").scale,
        lambda: setattr(config_of("a", kind="b"), "scale", 2.0),
        lambda: setattr(config_of("c"), "scale", 3.0), r"config_of\('c'\).scale was 1.0",
    ),
    "one in another": (
        lambda: inner().scale, lambda: setattr(inner(), "scale", 2.0), lambda: setattr(inner(), "scale", 3.0),
        r"inner\(\).scale was 2.0",
    ),
    "a cache that is cleared": (
        lambda: get_config().scale, lambda: setattr(get_config(), "scale", 2.0), lambda: get_config.cache_clear(),
        r"get_config\(\).scale was 2.0 .* is 1.0 now",
    ),
    "a static method": (
        lambda: REGISTRY.get("a").scale, lambda: setattr(Registry.get("a"), "scale", 2.0),
        lambda: setattr(Registry.get("a"), "scale", 3.0), "scale was 2.0",
    ),
    "a tensor": (lambda: table(CLASSES), lambda: table(CLASSES).mul_(2), lambda: table(CLASSES).mul_(2), None),
    "another tensor": (lambda: table(CLASSES), table.cache_clear, table.cache_clear, "is another tensor"),
    "random numbers": (lambda: noise(CLASSES), lambda: noise(CLASSES), lambda: None, None),
    "random numbers that come": (lambda: noise(CLASSES), lambda: None, lambda: None, None),
    "calls": (lambda: counted(), lambda: None, lambda: None, None),
    "what was read then": (
        lambda: gain("a"), lambda: gain("a"), lambda: GAINS.update(a=GAINS["a"] + 1), None,
    ),
    "too small a cache": (lambda: small(2) * small(3), lambda: None, lambda: None, None),
    "no cache": (lambda: never(2), lambda: None, lambda: None, None),
    "an error": (lambda: without(), lambda: None, lambda: None, None),
}  # fmt: skip
"""Name -> (what the model reads, what happens before, what afterwards, what is said then, if it is not followed)."""


@pytest.mark.every(3)
@pytest.mark.parametrize("name", KEPT)
def test_cached_functions(name):
    read, before, after, said = KEPT[name]
    before()
    step, plain = compiled(read)
    for _ in range(2):
        follows(step, plain)
    after()
    if said is None:
        follows(step, plain)
    else:
        with pytest.raises(ChangedAfterCompileError, match=said):
            step(IDX)


def test_a_cached_function_of_what_the_program_computes():
    follows(*compiled(kind=OfRows))


@pytest.mark.parametrize("first", [False, True], ids=["not yet", "read before"])
def test_properties_and_methods_that_are_kept(first):
    """They are read once; what they were made of may change, as in plain Python."""
    thing = Registry()
    step, plain = compiled(lambda: thing.scale, lambda: thing.times(3))
    if first:
        assert (thing.scale, thing.times(3)) == (1.0, 1.5)
    for _ in range(2):
        follows(step, plain)
    thing.base = 5.0
    follows(step, plain)
    thing.scale = 4.0
    with pytest.raises(ChangedAfterCompileError, match=r"scale was 1.0 when .* is 4.0 now"):
        step(IDX)
    del thing.scale  # read anew
    with pytest.raises(ChangedAfterCompileError, match=r"scale was 1.0 when .* is 10.0 now"):
        step(IDX)


LACKING = {
    "a module": (lambda: getattr(SETTINGS, "scale", 1.0), SETTINGS, "settings.scale was not there"),
    "hasattr": (lambda: EMPTY.scale if hasattr(EMPTY, "scale") else 1.0, EMPTY, "empty.scale was not there"),
    "try": (lambda: tried(TRIED), TRIED, "tried.scale was not there"),
    "a function": (lambda: getattr(helper, "scale", 1.0), helper, "helper.scale was not there"),
    "another's": (lambda: scale_of(other), other, "other.scale was not there"),
    "slots": (lambda: getattr(SLOTS, "scale", 1.0), SLOTS, "scale was added"),
    "a class": (lambda: getattr(Bare, "scale", 1.0), Bare, "scale was"),
}  # fmt: skip


def test_what_was_not_there():
    """In modules, functions, classes and slots, asked for by ``getattr``, ``hasattr`` and ``try``, and by others."""
    step, plain = compiled(*(read for read, _, _ in LACKING.values()))
    for _, thing, said in LACKING.values():
        follows(step, plain)
        if thing is not SLOTS:
            thing.unread = 5
        follows(step, plain)
        thing.scale = 2.0
        with pytest.raises(ChangedAfterCompileError, match=said):
            step(IDX)
        del thing.scale
    follows(step, plain)


def test_what_functions_keep_is_not_held():
    """A step that is gone holds neither a function's results nor what its methods were called on."""
    thing = Registry()
    step, plain = compiled(thing.reads_itself, lambda: get_config().scale)
    follows(step, plain)
    gone = weakref.ref(thing), weakref.ref(get_config())
    del step, plain, thing
    Registry.times.cache_clear()
    forget()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
