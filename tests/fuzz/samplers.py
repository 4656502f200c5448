"""Random samplers: source text over the graph level."""

import random

HEAD = """class Sampler:
    def __init__(self, graph):
        self.graph = graph
        self.rows = torch.arange(0, graph.num_nodes, 2, dtype=graph.indices.dtype)
        self.bias = (graph.edata["w"] + 0.1) ** 2

    def sample(self, graph, seeds):
"""

UNIFORM = (
    "block = graph[:, dsts].individual_sample({k})",
    "block = graph[:, dsts].individual_sample({k}, replace=True)",
)
"""What the fused sampling ops can take."""

DRAWS = (
    *UNIFORM,
    "block = graph[:, dsts].individual_sample(-1)",
    "block = graph[:, dsts].compact()",
    'block = graph[:, dsts].individual_sample({k}, probs="w")',
    "block = graph[:, dsts].individual_sample({k}, probs=self.bias, replace=True)",
    'block = graph[:, dsts].individual_sample(-1, probs="w")',
    """columns = graph[:, dsts]
bias = columns.edata["w"] * columns.srcdata["q"].index_select(0, columns.indices)
block = columns.individual_sample({k}, probs=bias)""",
    """columns = graph[:, dsts]
scores = columns.apply_edges(fn.u_add_v(columns.srcdata["q"], columns.dstdata["q"]))
block = columns.individual_sample({k}, probs=columns.edge_softmax(scores))""",
    """columns = graph[:, dsts]
columns.edata["w"]
block = columns.individual_sample({k})""",
    "block = graph[self.rows, dsts].individual_sample({k})",
    'block = graph[self.rows, dsts].individual_sample({k}, probs="w", replace=True)',
    "block = graph[:, dsts][self.rows, :].compact()",
    """near = graph[:, dsts].individual_sample(2)
block = graph[near.srcs, dsts].individual_sample({k})""",
    """first = graph[:, dsts].individual_sample(1)
second = graph[:, first.srcs].individual_sample({k}, replace=True)
block = graph[second.srcs, dsts].compact()""",
    "block = graph[:, dsts].collective_sample({wide})",
    'block = graph[:, dsts].collective_sample({wide}, node_probs="q")',
    """columns = graph[:, dsts]
block = columns.collective_sample({wide}, node_probs=columns.out_degrees().to(torch.float32) ** 2)""",
    """columns = graph[:, dsts]
share = 1.0 / columns.in_degrees().clamp(min=1).to(torch.float32)
block = columns.collective_sample({wide}, node_probs=columns.reverse().pull(fn.copy_u(share * share), "sum"))""",
    "block = graph[:, dsts].individual_sample({k}).remove_self_loops()",
    "block = graph[:, dsts].individual_sample({k}, replace=True).remove_self_loops()",
    "block = graph[:, dsts].compact().remove_self_loops()",
    """every = graph[:, dsts].compact()
block = every.keep_edges(every.edata["w"] > 0.3)""",
    """first = graph[:, dsts].individual_sample({k})
block = first.keep_edges(first.edata["type"] != 2)""",
)
"""One hop from ``dsts``; ``{k}`` picks per row, ``{wide}`` picks per layer."""

LOOPED = "block = graph[:, dsts].individual_sample({k}).add_self_loops()"
"""Edges without data."""


def sampler(rng: random.Random, hops: int, uniform: bool) -> tuple[str, str, list[bool]]:
    """(source of a class ``Sampler`` or nothing, the sampler as an expression, whether edges have data per block).

    Args:
        uniform: every hop is a uniform sample straight from the graph.
    """
    if rng.random() < 0.35 or (uniform and rng.random() < 0.5):
        return "", _built_in(rng, hops, uniform), [True] * hops
    lines, edata = ["dsts, blocks = seeds, []"], []
    for _ in range(hops):
        looped = not uniform and rng.random() < 0.08
        draw = LOOPED if looped else rng.choice(UNIFORM if uniform else DRAWS)
        lines += draw.format(k=rng.choice((1, 2, 3, 4)), wide=rng.choice((4, 9, 60))).splitlines()
        lines += ["blocks.insert(0, block)", "dsts = block.srcs"]
        edata.insert(0, not looped)
    lines.append("return blocks")
    return HEAD + "".join(f"        {line}\n" for line in lines), "Sampler(graph)", edata


def _built_in(rng: random.Random, hops: int, uniform: bool) -> str:
    fanouts = [rng.choice((1, 2, 3, 4) if uniform else (-1, 1, 2, 3, 4)) for _ in range(hops)]
    if not uniform and rng.random() < 0.3:
        return f"NeighborSampler(graph, {[-1] * hops})"
    if not uniform and rng.random() < 0.3:
        probs = rng.choice(('"q"', "None"))
        return f"LayerDependentSampler(graph, {[3 * abs(k) + 2 for k in fanouts]}, node_probs={probs})"
    probs = "None" if uniform else rng.choice(("None", "None", '"w"', 'graph.edata["w"]'))
    return f"NeighborSampler(graph, {fanouts}, replace={rng.random() < 0.3}, probs={probs})"
