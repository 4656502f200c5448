"""Random scripts and loops of one's own on a GPU, in CUDA graphs for most, beside plain PyTorch on the CPU."""

import pytest
import torch
from fuzz.own_loops import Loop
from fuzz.script_worlds import OverMacroBatches
from fuzz.scripts import Script

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def _on_the_gpu(monkeypatch):
    monkeypatch.setenv("JOESTAR_TEST_DEVICE", "cuda")


@pytest.mark.parametrize("number", [21, 58, 59, 85])
def test_scripts_as_in_plain_pytorch(number):
    """Parameters were thawed, the optimizer was new, and had no state when the step was recorded; a loop's own step
    came behind loading, with counts on the CPU."""
    Script(number).run()


@pytest.mark.parametrize("number", [10, 87])
def test_scripts_over_macro_batches_as_in_plain_pytorch(number):
    Script(number, side=OverMacroBatches).run()


@pytest.mark.parametrize("number", range(4))
def test_own_loops_as_in_plain_pytorch(number):
    Loop(number).run()


@pytest.mark.parametrize(("kind", "number"), [(Script, 4), (Loop, 4)])
def test_so_they_are_through_inductor(kind, number):
    kind(number, "inductor").run()
