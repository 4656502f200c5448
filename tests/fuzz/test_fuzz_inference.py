"""Random programs: inference in ranges of nodes gives what the program gives for blocks of the whole graph."""

import pytest
import torch

import joestar
from joestar.errors import JoestarError
from joestar.lowering.outputs import flatten
from joestar.runtime.inference import Inference

from .additions import EXTENDED
from .execute import Subject, build, forget
from .generate import PER_PACK, PER_SHARD, write
from .runs import TOLERANCE

ADDED = EXTENDED // PER_PACK
QUICK = (1, ADDED + 7)
"""Packs of ``make test``; the others are ``make fuzz``. Some of those with additions return structures."""
PACKS = [*range(PER_SHARD // PER_PACK), *range(ADDED, ADDED + 8)]


@pytest.mark.parametrize(
    "pack", [pack if pack in QUICK else pytest.param(pack, marks=pytest.mark.fuzz) for pack in PACKS]
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
    """Largest relative difference over ranges of some sizes; -1 if the program is refused, as it may be, 0 if it
    must be."""
    graph, model = subject.graph, subject.model.eval()
    ids = graph.indices.dtype
    layers = len(subject.sampler.sample(graph.keyed(0), torch.tensor([0, 1], dtype=ids)))
    blocks = joestar.NeighborSampler(graph, [-1] * layers).sample(graph, torch.arange(graph.num_nodes, dtype=ids))
    with torch.no_grad():
        expected = model(blocks, graph.ndata["x"][blocks[0].srcs.long()])
    try:
        inference = Inference(model, graph, layers)
    except JoestarError as error:
        must = "writes to a buffer in evaluation mode" in str(error)
        return 0.0 if must else -1.0
    results = [inference.run(batch_size=rows, progress=False) for rows in (None, 7, 1)]
    return max(_distance(result, expected) for result in results)


def _distance(result, expected) -> float:
    """Largest relative difference of tensors in structures, which must be alike."""
    found, wanted = [], []
    assert flatten(result, found) == flatten(expected, wanted)
    return max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in zip(found, wanted, strict=True))
