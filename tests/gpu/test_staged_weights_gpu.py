"""Draws by weight over macro-batches on a GPU: what the first stage drew, beside plain PyTorch on the CPU."""

import pytest

from tests.runtime.staged_plans import EDGES, plans
from tests.runtime.test_staged_weights import SEEDS, check, random_graph

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("of ours", "eager"), ("with replacement", "eager"), ("many", "eager"), ("three hops", "inductor"),
        ("squares", "eager"), ("heavy_ones", "eager"), ("two_calls", "inductor"),
    ],
)  # fmt: skip
def test_steps_draw_what_the_first_stage_drew_for_their_nodes(name, backend, monkeypatch):
    plans(monkeypatch)(seeds=SEEDS, edges=3 * EDGES)
    check(random_graph(), name, "padded", backend, "cuda", rel=1e-6)
