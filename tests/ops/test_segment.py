"""Segment programs: text, values and gradients against plain PyTorch in float64, padding, hostile scores."""

import itertools

import pytest
import torch

from joestar.kernels import cpu_segment
from joestar.kernels.cpu_segment_plan import gradient_plan
from joestar.kernels.segment_gradient import rows_kinds
from joestar.kernels.segment_program import FULL, HEAD, LEAVES, REDUCTIONS, SIZES, SegmentProgram
from joestar.kernels.segment_steps import ACROSS, BINARY, UNARY, WITH_NUMBER
from joestar.ops.aggregate.segment import reference

from .samples import values
from .segments import (
    PROGRAMS,
    compare,
    differentiable,
    leaves_of,
    random_program,
    structure,
    wide,
)
from .structures import structures

ops = torch.ops.joestar
RUN = ops.segment, ops.segment_grad


def call(name, program, heads, width, dtype=torch.float64):
    """Arguments of ``segment``; all that may have a gradient ask for one."""
    s = structure(name)
    leaves = leaves_of(program, heads, width, s, dtype)
    leaves = [leaf.requires_grad_(w) for leaf, w in zip(leaves, differentiable(program), strict=True)]
    return s.indptr, s.indices, leaves, program, heads


@pytest.mark.parametrize("text", [program for program, _, _ in PROGRAMS.values()])
def test_text_of_a_program(text):
    program = SegmentProgram.parse(text)
    assert str(program) == text and SegmentProgram.parse(str(program)) == program


WRONG = {
    "src": "-> in front", "src -> ": "names, values and numbers", "src -> max 0": "softmax score value",
    "src -> sum 1": "softmax score value", "table -> sum 0": "leaves out of", "src | gelu 0 -> sum 0": "steps out of",
    "src | relu 1 -> sum 0": "values before 1", "src | dot 0 -> sum 0": "2 values and 0 numbers of dot",
    "src_head | total 0 -> sum 0": "columns that total adds up", "scalar src_head | dot 0 1 -> sum 0": "columns",
    "src | relu x -> sum 0": "names, values and numbers",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_texts_that_are_no_program(text):
    with pytest.raises(ValueError, match=f"segment program: expected .*{WRONG[text]}"):
        SegmentProgram.parse(text)


ROW = torch.ones(1, 4)
TENSORS = {
    "more heads than columns": ("src -> softmax 0 0", [ROW], 3, "columns in 3 heads; got 4"),
    "a column per head": ("src src_head -> softmax 1 0", [ROW, ROW], 2, r"src_head \[1, 2\]; got \[1, 4\]"),
    "bits": ("src bits | mul 0 1 -> sum 2", [ROW, torch.ones(1, 1)], 1, "bits of torch.int32"),
    "dtypes": ("src dst | mul 0 1 -> sum 2", [ROW, ROW.double()], 1, "leaves of torch.float32"),
    "rows": ("src dst | mul 0 1 -> sum 2", [ROW, torch.ones(2, 4)], 1, r"dst \[1, 4\]; got \[2, 4\]"),
    "columns": ("src narrow_plain | mul 0 1 -> sum 2", [ROW, torch.ones(1, 17), torch.ones(4, 17)], 1, "1 to 16 col"),
    "count": ("src dst | mul 0 1 -> sum 2", [ROW], 1, "2 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name):
    program, leaves, heads, words = TENSORS[name]
    with pytest.raises(ValueError, match=words):
        ops.segment(torch.tensor([0, 1]), torch.tensor([0]), leaves, program, heads)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_structure(name):
    for s in structures():
        compare(RUN, *PROGRAMS[name], s, torch.float64, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_other_dtypes(dtype, tolerance):
    for program, heads, width in PROGRAMS.values():
        for name in ("padded", "hub"):
            compare(RUN, program, heads, width, structure(name, torch.int32), dtype, tolerance)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_random_programs(first):
    """Forward and every gradient, over a structure with padding, in blocks of a few edges and as a whole."""
    s = structure("padded")
    for seed in range(first, first + 25):
        program = random_program(seed)
        compare(RUN, program, 1 + seed % 3, 1 + seed % 4, s, torch.float64, 1e-10)


def test_random_programs_cover_the_language():
    """Else the test above shows less than it says."""
    texts = [random_program(seed) for seed in range(100)]
    words = {word for text in texts for word in text.split()}
    missing = {*BINARY, *UNARY, *WITH_NUMBER, *ACROSS, *REDUCTIONS, *SIZES} - words
    assert not missing and len(set(texts)) == 100


def test_a_score_per_edge_has_heads():
    """What a softmax leaves is one per head, of a number per edge as well."""
    assert SegmentProgram.parse("scalar src -> softmax 0 1").has_heads
    assert not SegmentProgram.parse("scalar src | mul 0 1 -> softmax 2 1").has_heads
    programs = [SegmentProgram.parse(random_program(seed)) for seed in range(300)]
    without = [program for program in programs if not program.has_heads]
    for program in without:  # tiles are cut anywhere: nothing that is read or stored may be one per head
        kinds = {*program.leaves, *itertools.chain(*rows_kinds(program))}
        assert not kinds.intersection(("src_head", "dst_head", "edge_head", "vector_head", "bits", "src_row")), program
    assert 10 < len(without) < 200


def bits_of_many_heads(run):
    """The mask that a layer's dropout applies: words are not filled one after the other. 31 to 70 columns."""
    s, key = structure("padded"), torch.tensor([7, 3, 0])
    for heads in (31, 32, 33, 40, 64, 70):
        edges = s.indices.numel()
        bits = ops.edge_dropout_bits(s.indptr, edges, torch.arange(s.num_dst), key, 0, 0.5, heads)
        ones = torch.ones(edges, heads)
        y = run(s.indptr, s.indices, [ones, bits], "edge_head bits | mul 0 1 -> edges 2", heads)[0]
        expected = ops.dropout_apply(ones, bits, 0.0, False)
        assert torch.equal(y[: s.edges], expected[: s.edges]), heads
        assert 0.3 < y[: s.edges].mean() < 0.7


def test_bits_of_many_heads():
    bits_of_many_heads(ops.segment)
    bits_of_many_heads(reference)


def test_attention_by_hand():
    """One destination after the other, with ``torch.softmax``: independent of programs."""
    s, heads, width = structure("bipartite"), 2, 3
    key, query, value, edge = (values((n, 6), torch.float64, seed) for seed, n in
                               enumerate((s.num_src, s.num_dst, s.num_src, s.indices.numel())))  # fmt: skip
    program = "src dst src edge | add 0 3 | dot 1 4 | mul_scalar 5 0.5 | add 2 3 -> softmax 6 7"
    tensors = [t.requires_grad_() for t in (key, query, value, edge)]
    y, top, total = ops.segment(s.indptr, s.indices, tensors, program, heads)
    rows = []
    for i in range(s.num_dst):
        e = slice(int(s.indptr[i]), int(s.indptr[i + 1]))
        k, v = ((t[s.indices[e]] + edge[e]).view(-1, heads, width) for t in (key, value))
        alpha = torch.softmax((k * query[i].view(heads, width)).sum(-1) * 0.5, 0)
        rows.append((alpha[..., None] * v).sum(0).flatten())
    expected, grad = torch.stack(rows), values((s.num_dst, 6), torch.float64, 9)
    torch.testing.assert_close(y, expected)
    found, good = (torch.autograd.grad(out, tensors, grad) for out in (y, expected))
    torch.testing.assert_close(found, good)
    assert not top.requires_grad and not total.requires_grad


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.every(2)
def test_numerical_gradients(name):
    indptr, indices, leaves, *rest = call("isolated", *PROGRAMS[name])

    def run(*asked):
        given = iter(asked)
        own = [next(given) if leaf.requires_grad else leaf for leaf in leaves]
        return tuple(y for y in ops.segment(indptr, indices, own, *rest) if y.requires_grad)

    assert torch.autograd.gradcheck(run, [leaf for leaf in leaves if leaf.requires_grad])


SCORES = {
    "huge": [1e30, -1e30, 1e30, 0.0],
    "far apart": [-1e4, 700.0, 710.0, -3e38],
    "masked out": [-torch.inf, 1.0, -torch.inf, 2.0],
    "the last alone": [-torch.inf, -torch.inf, -torch.inf, -1e30],
    "all masked": [-torch.inf] * 4,
    "infinite": [torch.inf, 1.0, 2.0, 3.0],
    "no number": [1.0, torch.nan, 2.0, 3.0],
}


def hostile(run, dtype=torch.float64):
    """Scores at the limits, at one destination between others: what ``torch.softmax`` gives, and 0 without edges."""
    indptr = torch.tensor([0, 1, 1, 5, 7])
    indices = torch.arange(7) % 3
    rows = values((3, 2), dtype, 1)
    for case, scores in SCORES.items():
        column = torch.tensor([0.5, *scores, 1.0, 2.0], dtype=dtype)[:, None]
        y, *_ = run(indptr, indices, [column, rows], "edge_head src -> softmax 0 1", 1)
        expected = torch.softmax(column[1:5, 0].double(), 0) @ rows[indices[1:5]].double()
        torch.testing.assert_close(y[2].double(), expected, equal_nan=True, rtol=1e-5, atol=1e-6, msg=case)
        assert not y[1].any() and torch.isfinite(y[[0, 3]]).all(), case


def test_hostile_scores():
    hostile(ops.segment)
    hostile(ops.segment, torch.float32)


@pytest.mark.parametrize("case", ["huge", "far apart", "masked out", "the last alone"])
def test_gradients_of_hostile_scores(case):
    scores = torch.tensor(SCORES[case], dtype=torch.float64)[:, None].requires_grad_()
    rows = values((4, 3), torch.float64, 1).requires_grad_()
    indptr, indices = torch.tensor([0, 0, 4]), torch.arange(4)
    y, *_ = ops.segment(indptr, indices, [scores, rows], "edge_head src -> softmax 0 1", 1)
    good = torch.softmax(scores[:, 0], 0) @ rows
    found, expected = (torch.autograd.grad(out, [scores, rows], values((3,), torch.float64, 2)) for out in (y[1], good))
    torch.testing.assert_close(found, expected)


def padded(args, rows=3, edges=5):
    """The same edges, with rows and edges behind them: rows of NaN, NaN for edges, ids of a source."""
    indptr, indices, leaves, program, heads = args
    out, own = [], iter(leaves)
    parsed = SegmentProgram.parse(program)
    for kind in (kind for leaf, kind in enumerate(parsed.leaves) if leaf not in parsed.beside):
        family = kind.removesuffix("_head")
        more = {"dst": rows}.get(family, edges if family in ("edge", "scalar", "bits") or "narrow" in kind else 0)
        for part in range(LEAVES.get(kind, 1)):
            leaf = next(own)
            filler = leaf.new_full((0 if part else more, *leaf.shape[1:]), torch.nan if kind != "bits" else -1)
            out.append(torch.cat([leaf.detach(), filler]).requires_grad_(leaf.requires_grad))
    indptr = torch.cat([indptr, indptr[-1:].expand(rows)])
    return indptr, torch.cat([indices, indices[:1].expand(edges)]), out, program, heads


@pytest.mark.parametrize("name", PROGRAMS)
def test_padding_is_never_read(name):
    """Results and gradients are those without padding, which are NaN in places that must not be read, and 0 behind."""
    exact = call("bipartite", *PROGRAMS[name])
    results = []
    for args in (exact, padded(exact)):
        outputs = [y for y in ops.segment(*args) if y.requires_grad]
        grads = []
        for y in outputs:
            true = exact[0].numel() - 1 if y.shape[0] == args[0].numel() - 1 else exact[1].numel()
            grads.append(torch.cat([values((true, y.shape[1]), torch.float64, 3), y[true:] + torch.nan]))
        asked = [leaf for leaf in args[2] if leaf.requires_grad]
        results.append((*outputs, *torch.autograd.grad(outputs, asked, [grad.detach() for grad in grads])))
    for good, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours[: good.shape[0]], good)
        assert not ours[good.shape[0] :].any()


def test_many_tiles(monkeypatch):
    """A CPU takes a tile of edges at a time; destinations with more edges go over several."""
    monkeypatch.setattr(cpu_segment, "_NUMBERS", 1)
    for program, heads, width in (PROGRAMS[name] for name in ("dot", "several", "per column", "every leaf", "gatv2")):
        for name in ("hub", "padded"):
            compare(RUN, program, heads, width, structure(name), torch.float64, 1e-12)


def test_gradients_of_sources_are_stored_or_computed_again(monkeypatch):
    """Either way the same sums, in the same order."""
    for program, heads, width in PROGRAMS.values():
        monkeypatch.setattr(cpu_segment, "_STORED_BYTES", 0)
        compare(RUN, program, heads, width, structure("hub"), torch.float64, 1e-12)
    stored = [gradient_plan(SegmentProgram.parse(PROGRAMS[name][0]), wanted, True).stored for name, wanted in
              (("gatv2", (True,) * 3), ("dot", (True, True, True, True, False)), ("rows", (True,)))]  # fmt: skip
    assert stored == [(FULL,), (HEAD, HEAD), ()]


@pytest.mark.parametrize("name", ["dot", "of nodes", "several", "gine", "gatv2", "kept"])
def test_registration(name):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.segment, call("padded", *PROGRAMS[name]), test_utils=checks)


def test_autocast():
    """Leaves of several dtypes take that of the sources' rows; bits stay what they are."""
    indptr, indices, leaves, program, heads = call("bipartite", *PROGRAMS["dot"], torch.float32)
    mixed = [leaf.detach() if leaf.dtype == torch.int32 else leaf.detach().bfloat16() for leaf in leaves]
    mixed[4:6] = [leaf.detach() for leaf in leaves[4:6]]  # the weight and bias of the narrow leaf stay float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.segment(indptr, indices, mixed, program, heads)[0]
    assert y.dtype == torch.bfloat16
    exact = reference(indptr, indices, wide([leaf.detach() for leaf in leaves]), program, heads)[0]
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.05)


def test_what_has_no_gradient():
    indptr, indices, leaves, program, heads = call("bipartite", *PROGRAMS["dot"])
    leaves[3] = leaves[3].detach().requires_grad_()
    with pytest.raises(ValueError, match="no gradient of narrow features"):
        ops.segment(indptr, indices, leaves, program, heads)
