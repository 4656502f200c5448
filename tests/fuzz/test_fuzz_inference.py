"""Random programs: inference in ranges of nodes gives what the program gives for blocks of the whole graph."""

import pytest
import torch

import joestar
from joestar.errors import JoestarError
from joestar.runtime.inference import Inference

from .execute import Subject, build, forget
from .generate import PER_PACK, PER_SHARD, write
from .runs import TOLERANCE

QUICK = (1,)
"""Packs of ``make test``; the others are ``make fuzz``."""


@pytest.mark.parametrize(
    "pack",
    [pack if pack in QUICK else pytest.param(pack, marks=pytest.mark.fuzz) for pack in range(PER_SHARD // PER_PACK)],
)
def test_ranges_agree_with_the_whole(pack, request):
    if pack in QUICK:  # the others are captured in the real way
        request.getfixturevalue("quick_captures")
    programs = [write(number) for number in range(pack * PER_PACK, (pack + 1) * PER_PACK)]
    found = [_difference(subject) for subject in build(programs)]
    forget(programs)
    torch._dynamo.reset()
    tolerance = TOLERANCE if "floats=torch.float32" not in programs[0].head else 1e-4
    wrong = [f"{p.title} differs by {d}:\n{p.source}" for p, d in zip(programs, found, strict=True) if d > tolerance]
    assert not wrong, "\n\n".join(wrong)
    assert sum(d >= 0 for d in found) > PER_PACK // 2, "most programs were refused"


def _difference(subject: Subject) -> float:
    """Largest relative difference over ranges of some sizes; -1 if the program is refused, as it may be."""
    graph, model = subject.graph, subject.model.eval()
    ids = graph.indices.dtype
    layers = len(subject.sampler.sample(graph.keyed(0), torch.tensor([0, 1], dtype=ids)))
    blocks = joestar.NeighborSampler(graph, [-1] * layers).sample(graph, torch.arange(graph.num_nodes, dtype=ids))
    with torch.no_grad():
        expected = model(blocks, graph.ndata["x"][blocks[0].srcs.long()])
    try:
        inference = Inference(model, graph, layers)
    except JoestarError:
        return -1.0
    results = [inference.run(batch_size=rows, progress=False) for rows in (None, 7, 1)]
    largest = max(1.0, expected.abs().max().item())
    return max((result - expected).abs().max().item() / largest for result in results)
