"""Kernels and places are told by layer and line of the user's model, in eager and compiled steps."""

from pathlib import Path

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import joestar
from joestar.bench.origins import Origin, Program, best, mark, operation, origin_of_frames, unmark
from joestar.bench.profile import profile
from joestar.lowering.origin import layer_of, model_line, node_frames
from joestar.profile.ledger import BETWEEN

from . import user_model

HERE = Path(user_model.__file__)
OWN = (str(HERE), "9", "forward", "self.conv(block, x)")
LIBRARY = (str(Path(joestar.__file__).parent / "nn" / "sage_conv.py"), "71", "forward", "self.lin_l(x)")
INSIDE = (str(Path(joestar.__file__).parent / "graph_api" / "computation.py"), "64", "pull", "self._spmm()")
INSTALLED = ("/usr/lib/python3/dist-packages/torch_geometric/nn.py", "1", "forward", "x")


def line(word: str) -> str:
    """``user_model.py:number`` of the line with this mark."""
    number = next(n for n, text in enumerate(HERE.read_text().split("\n"), 1) if f"# line: {word}" in text)
    return f"{HERE}:{number} in forward"


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        ([OWN, LIBRARY, INSIDE], OWN),  # the user's line, not that of our convolution
        ([OWN, INSTALLED], OWN),
        ([LIBRARY, INSIDE], LIBRARY),  # a model of ours: its line is the best there is
        ([INSIDE], None),
        ([], None),
    ],
)
def test_the_users_line_goes_before_ours(frames, wanted):
    assert model_line(frames) == ("" if wanted is None else "{}:{} in {}: {}".format(*wanted))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['model'].convs.0.lin_l", "convs.0.lin_l"),
        ("L['model'].convs._modules['0']", "convs.0"),
        ("L['model'].convs[1].lin", "convs.1.lin"),
        ("L['model']", ""),
    ],
)
def test_layers_are_named_as_in_named_modules(path, name):
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert layer_of(node) == ""
    node.meta["nn_module_stack"] = {"1": ("L['model']", None), "2": (path, None)}
    assert layer_of(node) == name


def test_operations_of_the_same_name_are_told_apart_by_their_order():
    one, two, other = Origin("a", "x"), Origin("b", "y"), Origin("c", "z")
    program = Program([("mm", one), ("add", other), ("mm", two)])
    assert program.origins(["mm", "add", "mm"]) == [one, other, two]
    assert program.origins(["mm", "add"]) == [Origin(), other]  # which of the two it is, is not known
    assert Program([("mm", one), ("mm", one)]).origins(["mm"]) == [one]
    assert program.origins(["relu"]) == [Origin()]
    assert best([Program([("mm", one)]), program, Program([("relu", one)])], ["mm", "mm"]) is program
    assert best([], ["mm"]).rows == []


def test_origins_of_a_fused_kernel_name_its_layers():
    many = [Origin(f"l{i}", "" if i == 0 else f"line {i}") for i in range(5)]
    assert Origin.merged([*many, many[1]]) == Origin("l0, l1, l2, 2 more", "line 1")
    assert Origin.merged([]) == Origin()


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("extern_kernels.mm:9", "aten::mm"),
        ("torch.ops.joestar.sample_cols.default:2", "joestar::sample_cols"),
        ("aten.index_put_:3", "aten::index_put_"),
        ("cpp_fused_relu_0:1", "cpp_fused_relu_0"),
        ("triton_poi_fused_relu_0:12", "triton_poi_fused_relu_0"),
    ],
)
def test_inductors_kernels_under_the_names_of_a_trace(kernel, name):
    assert operation(kernel) == name


def test_marks_name_layers_and_go_again():
    graph = fx.Graph()
    node = graph.placeholder("x")
    before = f'  File "{OWN[0]}", line 9, in forward\n    self.conv(block, x)\n'
    node.meta |= {"stack_trace": before, "nn_module_stack": {"1": ("L['model'].convs.0", None)}}
    mark(graph)
    mark(graph)
    text = node.meta["stack_trace"]
    assert text.count("joestar_layer") == 1
    assert origin_of_frames(text) == Origin("convs.0", "{}:{} in {}: {}".format(*OWN))
    assert model_line(node_frames(node)) == "{}:{} in {}: {}".format(*OWN)
    unmark(graph)
    assert node.meta["stack_trace"] == before


# --- real runs ---


def measured(backend: str):
    graph = joestar.load("cora")
    model = user_model.Net(1433, 8, 7)
    sampler = joestar.NeighborSampler(graph, [4, 3, 2])
    optimizer = torch.optim.Adam(model.parameters())
    return profile(
        model, sampler, F.cross_entropy, optimizer, graph.train_idx, 70, steps=1, warm_up=0, ablation=False,
        backend=backend,
    )  # fmt: skip


def layer(row) -> str:
    """The layer of a kernel or place, without the product within it, of which the order of operations decides."""
    return row.layer.removesuffix(".other").removesuffix(".own")


@pytest.fixture(scope="module")
def eager():
    return measured("eager")


def check(report) -> None:
    """The products of both layers, forwards and backwards, at the user's line; no wrappers; next to all attributed."""
    rows = report.profile.kernels
    names = {row.name for row in rows}
    assert all("::" in name or "_fused_" in name or name == BETWEEN for name in names), names
    assert not any(word in name for name in names for word in ("Compiled", "Backward", "##", "Optimizer"))
    for phase in ("forward", "backward"):
        lines = {(layer(row), row.source.partition(": ")[0]) for row in rows if row.phase == phase and row.shape}
        assert {("layers.0", line("update")), ("layers.1", line("update"))} <= lines
        assert ("last.nn", line("last")) in lines
    aggregations = {row.source.partition(": ")[0] for row in rows if "aggregate" in row.name and row.layer}
    assert line("aggregate") in aggregations
    model = [row for row in rows if row.phase in ("forward", "backward") and row.name != BETWEEN]
    known = sum(row.microseconds for row in model if row.layer)
    assert known > 0.8 * sum(row.microseconds for row in model)
    assert not any("/joestar/nn/" in row.source for row in rows)
    assert all("joestar_layer" not in text for p in report.programs for text in (p.graph_before, p.graph_after))
    places = report.programs[0].places
    assert {"layers.0", "layers.1"} <= {layer(spot) for spot in places}
    assert not any("/joestar/nn/" in spot.source for spot in places)


def test_eager_kernels_are_told_by_layer_and_line(eager):
    check(eager)
    assert eager.profile.stages == [] and eager.profile.baselines == []


@pytest.mark.slow
def test_compiled_kernels_are_told_by_layer_and_line():
    report = measured("inductor")
    check(report)
    fused = [row for row in report.profile.kernels if "_fused_" in row.name]
    assert len(fused) >= 4 and sum(bool(row.layer) for row in fused) >= 2
    once = report.counters.seconds["first backward"]
    assert report.compile_seconds > once > 0


def test_all_hops_have_sizes_even_those_that_are_not_stored(eager):
    sets = eager.programs[0].sets
    kinds = [f"hop {hop} {what}" for hop in range(3) for what in ("sampled edges", "source nodes")]
    assert [row.name for row in sets] == kinds
    stored = [row for row in sets if row.stored]
    assert 0 < len(stored) < len(sets)
    assert all(row.bound is None and 0 < row.minimum <= row.mean <= row.maximum for row in sets if not row.stored)
