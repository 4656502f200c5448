"""PyTorch's attention over tokens within rows, which are its batch: padded equals exact and eager, or is refused."""

import pytest
import torch
from captures import cheaper, real
from torch import nn

import joestar
from joestar.errors import PaddingError

from .harness import NUM_NODES, OLDER, WIDTH, Case, Rows, assert_refused, check_rows, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")


def tokens(h):
    """Two tokens of half the width: ``[n, 2, 4]``."""
    return h.view(-1, 2, WIDTH // 2)


def attended(attention, x, **options):
    return attention(x, x, x, **options)[0]


def test_multihead_attention():
    check_rows({
        "without weights": lambda m, b, h: attended(m.first_batch, tokens(h), need_weights=False).reshape(-1, WIDTH),
        "with weights": lambda m, b, h: attended(m.first_batch, tokens(h)).reshape(-1, WIDTH),
        "tokens first": lambda m, b, h: attended(m.first_tokens, tokens(h).transpose(0, 1)).transpose(0, 1).flatten(1),
        "weights used": lambda m, b, h: h + m.first_batch(*[tokens(h)] * 3)[1].sum((1, 2))[:, None],
        "over destinations": lambda m, b, h: h + attended(m.first_batch, tokens(h[: b.num_dst])).sum(),
        "of others": lambda m, b, h: h + m.first_batch(tokens(h), tokens(h.relu()), tokens(h))[0].flatten(1),
        "masked": lambda m, b, h: attended(
            m.first_batch, tokens(h), attn_mask=torch.tensor([[False, True], [False, False]])
        ).reshape(-1, WIDTH),
        "rows as tokens": lambda m, b, h: attended(m.whole, h[None])[0],
        "four tokens": lambda m, b, h: attended(m.narrow, h.view(-1, 4, 2)).reshape(-1, WIDTH),
    }, first_batch=nn.MultiheadAttention(WIDTH // 2, 2, batch_first=True).double(),
       first_tokens=nn.MultiheadAttention(WIDTH // 2, 2).double(),
       whole=nn.MultiheadAttention(WIDTH, 2, batch_first=True).double(),
       narrow=nn.MultiheadAttention(2, 2, batch_first=True).double())  # fmt: skip


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers(norm_first):
    options = {"dropout": 0.0, "norm_first": norm_first, "batch_first": True}
    layer = nn.TransformerEncoderLayer(WIDTH // 2, 2, 16, **options).double()
    check_rows({
        "one": lambda m, b, h: m.layer(tokens(h)).reshape(-1, WIDTH),
        "two": lambda m, b, h: m.layer(m.layer(tokens(h))).reshape(-1, WIDTH),
    }, layer=layer)  # fmt: skip


def test_predictions(texts):
    """There PyTorch takes one op for a whole layer; before 2.13 that cannot be traced, and is many ops."""
    graph = small_graph()
    layer = nn.TransformerEncoderLayer(WIDTH // 2, 2, 16, batch_first=True)
    model = Case(Rows(lambda m, b, h: m.layer(tokens(h)).reshape(-1, WIDTH), layer=layer)).model
    sampler = joestar.NeighborSampler(graph, [3])
    padded, exact = (joestar.compile(model, sampler, backend="eager", execution=how) for how in ("padded", "exact"))
    with cheaper(real):  # a quick trace takes the layer apart
        results = [step.predict(torch.arange(NUM_NODES), batch_size=20) for step in (padded, exact)]
    torch.testing.assert_close(*results)
    assert results[0].any()
    (program,) = padded.report().programs
    assert ("_transformer_encoder_layer_fwd" in program.graph_before) != OLDER


def test_what_mixes_rows_is_refused():
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True).double()
    assert_refused({
        "rows as tokens": (lambda m, b, h: attended(m.attention, h[None], need_weights=False)[0], "padded rows"),
        "read interleaved": (lambda m, b, h: h + tokens(h).transpose(0, 1).reshape(-1, 4).mean(0).sum(), "interleaves"),
        "other order": (
            lambda m, b, h: h + m.lin(tokens(h).transpose(0, 1).reshape(-1, 4)).view(-1, 2, 4).sum(1).sum(1)[:, None],
            "interleaves",
        ),
        "product and sum": (
            lambda m, b, h: h + m.lin(tokens(h).transpose(0, 1).reshape(-1, 4)).relu().sum(), "interleaves",
        ),
    }, "test_padding_tokens.py", attention=attention, lin=nn.Linear(4, 4).double())  # fmt: skip


def test_dropout_of_weights_says_what_can_be_done():
    layer = nn.TransformerEncoderLayer(WIDTH // 2, 2, 16, batch_first=True)
    model = Rows(lambda m, b, h: m.layer(tokens(h)).reshape(-1, WIDTH), layer=layer)
    with pytest.raises(PaddingError, match=r"layer.self_attn.dropout = 0.0 of a TransformerEncoderLayer"):
        Case(model).trace()
    model.layer.self_attn.dropout = 0.0
    case = Case(model, plain=False)
    seeds = case.seeds()
    torch.testing.assert_close(case.padded(seeds, 0).loss, case.exact(seeds, 0).loss)
