"""Programs that compute with the ids of nodes: lines put into a random model."""

import random
from dataclasses import replace

from .generate import PER_PACK, Written, setting

FORWARD = "    def forward(self, blocks, x):\n"
INIT = "        super().__init__()\n"
ADDED = (
    ("x + (blocks[0].srcs % 7).to(x.dtype)[:, None] / 7", ""),
    ("x * (1 + blocks[0].srcs / blocks[0].graph.num_nodes)[:, None].to(x.dtype)", ""),
    ("x + ((blocks[0].srcs.long() * 2654435761 >> 5) % 64)[:, None].to(x.dtype) / 64", ""),
    ("x + self.by_node(blocks[0].srcs)", "nn.Embedding({nodes}, {features})"),
    ("x + self.by_node((blocks[0].srcs * 5 + 1) % {nodes})", "nn.Embedding({nodes}, {features})"),
    (
        "x + torch.index_select(self.by_node, 0, blocks[0].srcs)",
        "nn.Parameter(torch.linspace(-1, 1, {nodes})[:, None])",
    ),
    ("x + (blocks[-1].graph.num_edges % 5) / 5", ""),
)
"""(features, with something of their nodes; a module of the model's own)."""


def reads_ids(written: Written) -> Written:
    """The program, whose features know their nodes' ids."""
    shared = setting(written.number // PER_PACK)
    expression, module = random.Random(f"ids of {written.number}").choice(ADDED)
    sizes = {"nodes": shared.nodes, "features": shared.features}
    body = written.body.replace(FORWARD, f"{FORWARD}        x = {expression.format(**sizes)}\n", 1)
    if module:
        body = body.replace(INIT, f"{INIT}        self.by_node = {module.format(**sizes)}\n", 1)
    return replace(written, body=body)
