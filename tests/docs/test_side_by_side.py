"""Where a page shows the same program in another library and here, both print the same numbers.

They are run with every neighbour and without dropout, where nothing is random: samples of one library cannot be those
of another.
"""

import re
import sys
import types

import pytest
import torch

from tests.docs.pages import DOCS, run_page

pytestmark = pytest.mark.usefixtures("cheapest_captures")

NUMBER = re.compile(r"\d+\.\d+")


def without_chance(block):
    """The block with all neighbours, no dropout."""
    code = block.code.replace("[10, 10]", "[200, 200]").replace("dropout=0.5", "dropout=0.0")
    return block._replace(code=code.replace("F.dropout(h, 0.5,", "F.dropout(h, 0.0,"))


def numbers(printed: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(printed)]


def assert_same_course(theirs: str, ours: str):
    theirs, ours = numbers(theirs), numbers(ours)
    assert len(theirs) == len(ours) == 6  # the losses of five epochs, and a score
    assert theirs[:5] == pytest.approx(ours[:5], abs=2e-3) and theirs[5] == pytest.approx(ours[5], abs=2e-3)
    assert ours[4] < 0.8 * ours[0] and ours[5] > 0.3


class NeighborLoader:
    """Batches as PyG's loader makes them where every neighbour is taken, for machines without pyg-lib: seeds first."""

    def __init__(self, data, num_neighbors, batch_size, input_nodes, shuffle):
        seeds = input_nodes.nonzero().flatten()
        self.seeds = seeds[torch.randperm(len(seeds))] if shuffle else seeds
        self.data, self.hops, self.batch_size = data, len(num_neighbors), batch_size

    def __iter__(self):
        from torch_geometric.utils import k_hop_subgraph

        for seeds in self.seeds.split(self.batch_size):
            nodes, edges, _, _ = k_hop_subgraph(seeds, self.hops, self.data.edge_index)
            order = torch.cat([seeds, nodes[~torch.isin(nodes, seeds)]])
            place = torch.full((self.data.num_nodes,), -1).scatter(0, order, torch.arange(len(order)))
            yield types.SimpleNamespace(
                x=self.data.x[order], y=self.data.y[order], edge_index=place[edges], batch_size=len(seeds)
            )


@pytest.fixture
def loader(monkeypatch):
    """The loader that a page of PyG's imports, for every neighbour."""
    pytest.importorskip("torch_geometric")
    module = types.ModuleType("torch_geometric.loader")
    module.NeighborLoader = NeighborLoader
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_pyg_and_joestar(tmp_path, loader):
    def edit(block):
        return without_chance(block)._replace(mark="run")

    printed = run_page(DOCS / "from-pyg.md", tmp_path, edit)
    assert_same_course(printed[1], printed[2])


def test_a_plain_loop_and_joestar_and_what_comes_from_dgl(tmp_path):
    plain = run_page(DOCS / "from-a-plain-loop.md", tmp_path, without_chance)
    assert_same_course(plain[1], plain[2])
    dgl = run_page(DOCS / "from-dgl.md", tmp_path, without_chance)
    assert numbers(dgl[1]) == pytest.approx(numbers(plain[2]), abs=2e-3)
