"""Random programs over the graph level: every execution of each agrees with a plain PyTorch loop, through every pass.

A program that fails is printed with its source; ``PYTHONPATH=tests python -m fuzz <number>`` repeats it alone.
"""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from joestar.fusion import PASSES

from .additions import EXTENDED, MESSAGES
from .execute import ALL, OF_UNIONS, Report, run_pack
from .generate import PER_PACK, PER_SHARD, write
from .motifs import ELSEWHERE, motifs_of
from .rows import MODULES

SHARDS = 30
QUICK, CHECKED = 3, 9
"""Shards of ``make test``, which are not thorough; those up to which ``make fuzz`` goes; ``make test-all`` runs all."""
EXTENDED_SHARDS, EXTENDED_CHECKED = 4, 2
"""Of programs with additions: all, and those of ``make fuzz``."""
FIRED, FURTHER = 1, 3
"""Rewrites of every pass in a shard, at least; shards behind it in which a pass may do so, if it did not there."""
REALLY_CAPTURED = {True: 1 / 3, False: 1 / 30}
"""Share of the packs that go through the real capture, in thorough shards and in others (``tracing.py``)."""


def report_of(packs: range, thorough: bool) -> Report:
    """What became of the programs of packs."""
    report = Report(thorough)
    for pack in packs:
        really = random.Random(f"capture {pack}").random() < REALLY_CAPTURED[report.thorough]
        run_pack(pack, report, quick=not really)
    torch._dynamo.reset()  # what its caches hold on to grows with every capture
    return report


def check(report: Report, programs: int) -> None:
    """Asserts that all of the programs agree with their references, and were not refused."""
    assert report.programs == programs
    assert not report.wrong, f"{len(report.wrong)} programs differ:\n\n" + "\n\n".join(report.wrong[:3])
    refused = "\n".join(f"{name}: {message}" for name, message in report.refused.items())
    assert len(report.refused) <= programs // 10, f"{len(report.refused)} programs were refused:\n{refused}"
    run = programs - len(report.refused)
    assert report.impossible <= programs // 10
    assert report.moving > 0.9 * (run - report.impossible), "too few programs have gradients to compare"
    assert report.plain > 0.9 * (run - report.impossible), (
        "few programs that plain Python can run were compared with it"
    )
    assert report.trained >= programs // 5 and report.overflows >= programs // 10


def check_rewrites(report: Report, shard: int) -> None:
    """Every pass rewrites something in a shard, or in some later program that is steered to it: of a hundred only two
    are, and either may have what a pass refuses."""
    seldom = {name: n for name, n in report.rewrites.items() if n < FIRED and name not in ELSEWHERE}
    for name in list(seldom):
        later = range((shard + 1) * PER_SHARD, (shard + 1 + FURTHER) * PER_SHARD)
        for number in (number for number in later if write(number).steered == name):
            more = Report()
            run_pack(number // PER_PACK, more, only=number)
            assert not more.wrong, more.wrong
            if more.rewrites[name]:
                del seldom[name]
                break
    assert not seldom, (
        f"passes that rewrote less often than {FIRED} times in these programs: {seldom}. Their motifs in "
        "tests/fuzz/motifs.py no longer make them fire: look at the refusals with PYTHONPATH=tests python -m fuzz N."
    )


def extended(packs: range) -> range:
    """The same packs among those with additions."""
    return range(EXTENDED // PER_PACK + packs.start, EXTENDED // PER_PACK + packs.stop)


def test_executions_of_some_with_additions_agree():
    report = report_of(extended(range(13, 14)), thorough=False)
    check(report, PER_PACK)


@pytest.mark.parametrize("message", MESSAGES)
def test_message_functions_run(message):
    """In plain PyTorch: what raises in every program (``- True`` did) compares nothing."""
    rows = SimpleNamespace(src={"h": torch.randn(4, 3, requires_grad=True)}, dst={"g": torch.randn(4, 3)})
    made = eval(message, {"torch": torch}, {"edges": rows})
    assert made.isfinite().all() and torch.autograd.grad(made.sum(), rows.src["h"])


def test_writes_to_written_buffers_are_part_of_a_program():
    """``buffer.mul_(0.9).add_(x)``, the average of some programs: taken apart, programs lost the second write."""
    report, form = Report(), ".mul_(0.9).add_("
    number = next(number for number in range(EXTENDED, EXTENDED + 1000) if form in write(number).source)
    run_pack(number // PER_PACK, report, only=number)
    assert report.compared and not report.wrong


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "shard", [pytest.param(n, marks=() if n < EXTENDED_CHECKED else pytest.mark.slow) for n in range(EXTENDED_SHARDS)]
)
def test_executions_with_additions_agree(shard):
    packs = PER_SHARD // PER_PACK
    check(report_of(extended(range(shard * packs, (shard + 1) * packs)), thorough=True), PER_SHARD)


def of_runs(shard: int):
    """In ``make test``, ``make fuzz`` or ``make test-all``."""
    marks = () if shard < QUICK else pytest.mark.fuzz if shard < CHECKED else (pytest.mark.fuzz, pytest.mark.slow)
    return pytest.param(shard, marks=marks)


@pytest.mark.parametrize("shard", list(map(of_runs, range(SHARDS))))
def test_executions_agree(shard):
    packs = PER_SHARD // PER_PACK
    report = report_of(range(shard * packs, (shard + 1) * packs), thorough=shard >= QUICK)
    check(report, PER_SHARD)
    check_rewrites(report, shard)


def test_every_pass_has_a_motif():
    for spec in PASSES:
        assert spec.name in ELSEWHERE or motifs_of(spec.name)
    with pytest.raises(LookupError, match=r"pass 'new' has no motif.*Add to MOTIFS in tests/fuzz/motifs\.py"):
        motifs_of("new")


@functools.cache
def sources() -> list[str]:
    """Of all programs."""
    return [write(number).source for number in range(SHARDS * PER_SHARD)]


def test_programs_are_distinct_and_repeatable():
    assert len(set(sources())) == len(sources()) == 3000
    assert [write(number).source for number in range(300)] == sources()[:300]
    assert {write(number).steered for number in range(PER_SHARD)} >= set(ALL) - OF_UNIONS
    assert {write(number).autocast for number in range(0, CHECKED * PER_SHARD, PER_PACK)} == {"", "bfloat16", "float16"}


PIECES = (
    "NeighborSampler(", "LayerDependentSampler(", "replace=True", "probs=", "collective_sample", "keep_edges",
    "remove_self_loops", "add_self_loops", "int64", "nn.Linear", "nn.Sequential", ".relu()", "F.elu", "F.leaky_relu",
    "dropout", "LayerNorm", "BatchNorm1d", "torch.cat", "torch.stack", '"max"', '"min"', '"mean"', '"sum"',
    "out_degrees()", "graph_degrees", "rsqrt", "edge_softmax", "u_add_v", "fn.u_mul_e", 'edata["f"]', "lambda edges",
    "apply_edges", "reverse()", "GATConv", "GCNConv", "SAGEConv", "GINConv", "F.cross_entropy(z, y, ignore_index",
    "binary_cross_entropy_with_logits", "mse_loss", 'reduction="sum"', 'form="reversed"', 'form="union"',
    'form="hubs"', 'form="by degree"', 'form="hubs by degree"', 'form="hollow"', "[-1, -1]", "[-1, -1, -1]",
    "floats=torch.float32", ".graph\n", "edge_softmax(v", "[:1]", "(1, 1)", "torch.full((1, 1), 0.7)",
    ".exp()", "torch.exp2", "torch.expm1", ".sinh()", ".cosh()", "fn.e_sub_v", "fn.e_div_v", "300 * ",
    "known=True", "eps=0.1).eval()", "affine=False).eval()", "momentum=None", "track_running_stats=False",
    "F.cross_entropy(z[:, 3:], y)", "+ 0.4 * F.cross_entropy(", "nn.Linear(1, ", ", 1, bias",
)  # fmt: skip


def test_every_piece_occurs():
    text = "\n".join(sources())
    pieces = [*PIECES, *(f"nn.{made.partition('(')[0]}(" for made in MODULES)]
    assert not [piece for piece in pieces if text.count(piece) < 5]


ADDED = (
    ".scatter(1, ", ".scatter_add(1, ", ".scatter_reduce(1, ", ".index_add(1, ", ".gather(1, ", "take_along_dim(",
    ".index_copy(1, ", "distributions.Normal(",
    ".index_add(0, ", ".scatter_add(0, ", ".scatter_reduce(0, ", "nn.Embedding(", "nn.EmbeddingBag(", 'mode="max"',
    "per_sample_weights", "avg_pool1d", "max_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "F.conv1d",
    "nn.MultiheadAttention(", "nn.TransformerEncoderLayer(", "need_weights=False", " += 1\n",
    ".num_dst\n", ".mul_(0.9).add_(", ".bfloat16().to(", ".half().to(", "torch.finfo(", "torch.einsum(", "torch.bmm(",
    ".nonzero()[:, 0]]", "[m := ", "].mean(0).nan_to_num()",
    "torch.lerp(", "is_autocast_enabled", ".dtype == torch.float64",
    "torch.arange(z.shape[0])", "F.normalize(z, dim=1) @", "z[:, 0]", '0.5 * edges.src["h"] + 2 *', "7 // 2 *",
    'return {"logits": ', "z, other = z\n", 'return {"both": [', "blocks[-1].num_dst",
    ".num_dst ** -0.5", ".num_edges / (1 + ", ".num_dst / 9)",
    ":1].softmax(0)", "float('-inf')).softmax(-1)", "logsumexp(1)[:, None]", ", 'amax').clamp(", "F.embedding_bag(",
)  # fmt: skip


def test_every_addition_occurs_and_only_there():
    text = "\n".join(write(EXTENDED + number).source for number in range(1500))
    assert not [piece for piece in ADDED if text.count(piece) < 5]
    assert not [piece for piece in ("EmbeddingBag", "pool1d", "Multihead", "other") if piece in "\n".join(sources())]


NO_ROWS = {"Softmax2d", "MultiheadAttention"}
"""Activations of ``torch.nn`` that do not take rows."""


def test_every_activation_of_torch_nn_occurs():
    assert {made.partition("(")[0] for made in MODULES} == set(nn.modules.activation.__all__) - NO_ROWS
