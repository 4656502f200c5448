"""Random programs over the graph level: every execution of each agrees, through every pass.

A program that fails is printed with its source; ``PYTHONPATH=tests python -m fuzz <number>`` repeats it alone.
"""

import functools

import pytest
import torch

from joestar.fusion import PASSES

from .execute import ALL, Report, run_pack
from .generate import PER_PACK, PER_SHARD, write
from .motifs import motifs_of

SHARDS = 10
QUICK = 2
"""Shards of ``make test``; the others are ``make fuzz``."""
FIRED = 30
"""Rewrites of every pass over all shards, at least."""


@functools.cache
def report_of(shard: int) -> Report:
    """What became of the programs of a shard."""
    report = Report()
    packs = PER_SHARD // PER_PACK
    for pack in range(shard * packs, (shard + 1) * packs):
        run_pack(pack, report)
    torch._dynamo.reset()  # what its caches hold on to grows with every capture
    return report


@pytest.mark.parametrize(
    "shard", [shard if shard < QUICK else pytest.param(shard, marks=pytest.mark.fuzz) for shard in range(SHARDS)]
)
def test_executions_agree(shard):
    report = report_of(shard)
    assert report.programs == PER_SHARD
    assert not report.wrong, f"{len(report.wrong)} programs differ:\n\n" + "\n\n".join(report.wrong[:3])
    refused = "\n".join(f"{name}: {message}" for name, message in report.refused.items())
    assert len(report.refused) <= PER_SHARD // 10, f"{len(report.refused)} programs were refused:\n{refused}"
    seldom = {name: count for name, count in report.rewrites.items() if count < FIRED / SHARDS}
    assert not seldom, (
        f"passes that rewrote less often than {FIRED / SHARDS:.0f} times in this shard: {seldom}. Their motifs in "
        "tests/fuzz/motifs.py no longer make them fire: look at the refusals with PYTHONPATH=tests python -m fuzz N."
    )
    assert report.moving > 0.9 * (PER_SHARD - len(report.refused)), "most programs have no gradients to compare"


def test_every_pass_has_a_motif():
    for spec in PASSES:
        assert motifs_of(spec.name)
    with pytest.raises(LookupError, match=r"pass 'new' has no motif.*Add to MOTIFS in tests/fuzz/motifs\.py"):
        motifs_of("new")


def test_programs_are_distinct_and_repeatable():
    numbers = range(SHARDS * PER_SHARD)
    sources = [write(number).source for number in numbers]
    assert len(set(sources)) == len(sources) == 1000
    assert [write(number).source for number in numbers] == sources
    assert {write(number).steered for number in range(PER_SHARD)} >= set(ALL)


PIECES = (
    "NeighborSampler(", "LayerDependentSampler(", "replace=True", "probs=", "collective_sample", "keep_edges",
    "remove_self_loops", "add_self_loops", "int64", "nn.Linear", "nn.Sequential", ".relu()", "F.elu", "F.leaky_relu",
    "dropout", "LayerNorm", "BatchNorm1d", "torch.cat", "torch.stack", '"max"', '"min"', '"mean"', '"sum"',
    "out_degrees()", "graph_degrees", "rsqrt", "edge_softmax", "u_add_v", "fn.u_mul_e", 'edata["f"]', "lambda edges",
    "apply_edges", "reverse()", "GATConv", "GCNConv", "SAGEConv", "GINConv", "F.cross_entropy(z, y, ignore_index",
    "binary_cross_entropy_with_logits", "mse_loss", 'reduction="sum"', 'form="reversed"', 'form="union"',
)  # fmt: skip


def test_every_piece_occurs():
    text = "\n".join(write(number).source for number in range(SHARDS * PER_SHARD))
    assert not [piece for piece in PIECES if text.count(piece) < 5]
