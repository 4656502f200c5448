"""Layers with attention of their own, and the program that each is."""

import math

import torch
import torch.nn.functional as F

from joestar import fn

from .edge_layers import WIDTH, split


def _ends(block, h, own):
    return block.apply_edges(fn.copy_u(h)), block.apply_edges(lambda edges: edges.dst["g"], dst={"g": own})


def dot_product(self, block, h, own):
    """Keys and values with edge features."""
    key, query = _ends(block, split(self.mix(h)), split(self.dst(own)))
    edge = split(self.lin(block.edata["f"]))
    alpha = block.edge_softmax(((key + edge) * query).sum(-1) / math.sqrt(WIDTH))
    value = block.apply_edges(fn.copy_u(split(h))) + edge
    return block.pull(fn.copy_e(value * alpha[..., None]), "sum").flatten(1)


def plain_products(self, block, h, own):
    """``u_dot_v``, and dropout of the coefficients."""
    alpha = block.edge_softmax(block.apply_edges(fn.u_dot_v(split(self.mix(h)), split(self.dst(own)))) * 0.5)
    alpha = F.dropout(alpha, 0.3, self.training)
    return block.pull(fn.u_mul_e(split(h), alpha), "sum").flatten(1)


def additive(self, block, h, own):
    """GATv2 with edge features."""
    left = split(self.mix(h))
    pairs = block.apply_edges(fn.u_add_v(left, split(self.dst(own)))) + split(self.plain(block.edata["f"]))
    alpha = block.edge_softmax((F.leaky_relu(pairs, 0.2) * self.att).sum(-1))
    return block.pull(fn.u_mul_e(left, alpha), "sum").flatten(1)


def of_nodes(self, block, h, own):
    """GAT with scores of the edges."""
    z = split(self.mix(h))
    left, right = ((rows * self.att).sum(-1) for rows in (z, split(self.dst(own))))
    edge = (split(self.lin(block.edata["f"])) * self.att).sum(-1)
    scores = F.leaky_relu(block.apply_edges(fn.u_add_v(left, right)) + edge, 0.2)
    return block.pull(fn.u_mul_e(z, block.edge_softmax(scores)), "sum").flatten(1)


def per_column(self, block, h, own):
    """Softmax aggregation with a learnt temperature."""
    rows = block.apply_edges(fn.copy_u(h))
    return block.pull(fn.copy_e(rows * block.edge_softmax(rows * (self.eps + 1))), "sum")


def one_head(self, block, h, own):
    """A score per edge without a dimension of its own, and edge weights of the coefficients."""
    key, query = _ends(block, self.mix(h), own)
    alpha = block.edge_softmax(torch.tanh((key * query).sum(-1)) + block.edata["w"]) * block.edata["w"]
    return block.pull(fn.u_mul_e(h, alpha), "sum")


def gated(self, block, h, own):
    """A value that is computed from both ends, and a score that reads it as well."""
    key, query = _ends(block, split(self.mix(h)), split(own))
    pair = torch.sigmoid(key - query)
    alpha = block.edge_softmax((pair * self.per_column).sum(-1))
    return block.pull(fn.copy_e(pair * key * alpha.unsqueeze(2)), "sum").flatten(1)


def stored_edges(self, block, h, own):
    """Edge data that are no product of few columns."""
    key, query = _ends(block, split(self.mix(h)), split(self.dst(own)))
    edge = split(torch.tanh(self.lin(block.edata["f"])).softmax(1))
    alpha = block.edge_softmax((key * query * edge).sum(-1))
    return block.pull(fn.copy_e((key + edge) * alpha[..., None]), "sum").flatten(1)


def looped(self, block, h, own):
    """With self-loops."""
    block = block.add_self_loops()
    alpha = block.edge_softmax(block.apply_edges(fn.u_dot_v(split(self.mix(h)), split(own))))
    return block.pull(fn.u_mul_e(split(h), alpha), "sum").flatten(1)


LAYERS = {
    "dot product": (
        dot_product,
        "src dst narrow src | add 0 2 | mul 4 1 | total 5 | mul_scalar 6 0.5773502691896258 | add 3 2"
        " -> softmax 7 8, 2",
    ),
    "plain products": (
        plain_products,
        "src dst src bits | dot 0 1 | mul_scalar 4 0.5 | mul_scalar 3 1.4285714285714286 | mul 2 6 -> softmax 5 7, 2",
    ),
    "additive": (
        additive,
        "src dst narrow_plain vector | add 0 1 | add 4 2 | leaky_relu 5 0.2 | mul 6 3 | total 7 -> softmax 8 0, 2",
    ),
    "of nodes": (
        of_nodes,
        "narrow vector src_head dst_head src | mul 0 1 | total 5 | add 2 3 | add 7 6 | leaky_relu 8 0.2"
        " -> softmax 9 4, 2",
    ),
    "per column": (per_column, "src vector | mul 0 1 -> softmax 2 0, 1"),
    "one head": (
        one_head, "src dst scalar src | mul 0 1 | total 4 | tanh 5 | add 6 2 | mul 3 2 -> softmax 7 8, 1",
    ),
    "gated": (gated, "src dst vector | sub 0 1 | sigmoid 3 | mul 4 2 | total 5 | mul 4 0 -> softmax 6 7, 2"),
    "stored edges": (stored_edges, "src dst edge | mul 0 1 | mul 3 2 | total 4 | add 0 2 -> softmax 5 6, 2"),
    "self-loops": (looped, "src dst src | dot 0 1 -> softmax 3 2, 2"),
}  # fmt: skip
"""Name -> (layer, the text of its program and its heads)."""
