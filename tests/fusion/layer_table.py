"""Which passes take which layers, and what is left: the table of docs/passes.md.

``PYTHONPATH=tests python -m fusion.layer_table --write`` makes it; with names of forms, tries only those.
"""

import copy
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import joestar
from captures import cheaper, quick
from fusion.layer_forms import FORMS, Net
from joestar.fusion import run_passes
from joestar.profile.sizes import step_key
from joestar.runtime.program import Options, Program

SEEDS, FANOUTS, FEATURES, HIDDEN, CLASSES = 100, [10, 5], 100, 128, 47


def graph(weighted: bool = False) -> joestar.Graph:
    """6,000 nodes of degree 50, 100 features each: widths of ogbn-products."""
    random = torch.Generator().manual_seed(0)
    nodes, edges = 6000, 300_000
    made = joestar.Graph.from_edge_index(
        torch.randint(0, nodes, (2, edges), generator=random), nodes,
        ndata={"x": torch.randn(nodes, FEATURES, generator=random), "y": torch.arange(nodes) % CLASSES},
    )  # fmt: skip
    made.edata["w"] = torch.rand(edges, generator=random) + 0.1
    return made


class _Heard(TorchDispatchMode):
    """Ops over rows that ran: (name, shape of the widest result)."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.ran.append((str(function).rsplit(".", 1)[0], function, args, found))
        return found


def passed(name: str, device: str = "cuda", disable: tuple[str, ...] = ()):
    """(the graph after the passes, its program, context) of a form, under the choices of a device."""
    form, options = FORMS[name]
    torch.manual_seed(0)
    made = graph()
    weighted = name.endswith("weighted picks")
    model = Net(form, FEATURES, HIDDEN, CLASSES, **options).train()
    sampler = joestar.NeighborSampler(made, FANOUTS, probs="w" if weighted else None)
    program = Program("train", model, sampler, torch.nn.functional.cross_entropy, Options("eager", ALL))
    seeds, key = torch.arange(SEEDS, dtype=made.indices.dtype), step_key(0, 0, 0, "cpu")
    with cheaper(quick):
        program.trace(seeds, key)
    return program
