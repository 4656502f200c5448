"""Where Inductor finds no C++ compiler, as a wheel's users may have none."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.errors import JoestarWarning
from joestar.runtime import compiler


@pytest.fixture
def graph():
    torch.manual_seed(0)
    made = joestar.Graph.from_edge_index(torch.randint(0, 30, (2, 200)), 30)
    made.ndata["x"], made.ndata["y"] = torch.randn(30, 6), torch.randint(0, 3, (30,))
    return made


def loss_and_step(graph, **options):
    torch.manual_seed(1)
    model = joestar.nn.GraphSAGE(6, 4, 2, 3)
    sampler = joestar.NeighborSampler(graph, [3, 3])
    step = joestar.compile(model, sampler, F.cross_entropy, torch.optim.Adam(model.parameters()), **options)
    return float(next(iter(step.epoch(torch.arange(20), 20)))), step


def test_without_a_compiler_the_step_runs_eagerly_and_says_so(graph, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    with pytest.warns(JoestarWarning, match=r"no C\+\+ compiler .* runs with backend='eager'.*Install g\+\+") as seen:
        loss, step = loss_and_step(graph)
    assert seen[0].filename == __file__, "the warning names the user's line"
    assert step.report().backend == "eager"
    assert loss == loss_and_step(graph, backend="eager")[0]


def test_no_warning_where_nothing_would_be_compiled_or_all_is_there(graph, monkeypatch, recwarn, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler.usable_backend("eager", torch.device("cpu")) == "eager"
    assert compiler.usable_backend("inductor", torch.device("cuda")) == "inductor"
    assert "no-such-compiler, which is not found" in compiler.problem()[0]
    model = joestar.nn.GraphSAGE(6, 4, 2, 3)
    joestar.compile(model, joestar.NeighborSampler(graph, [3, 3]), execution="exact")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compiler.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert compiler.problem() is None
    assert compiler.usable_backend("inductor", torch.device("cpu")) == "inductor"
    assert not [warning for warning in recwarn if issubclass(warning.category, JoestarWarning)]
