"""Every convolution of PyG does what docs/pyg.md says of it, and gives what PyG gives."""

import re

import pytest
import torch_geometric.nn.conv as theirs

from pyg.conv_table import CASES, OTHERS, REFUSED, table, tried, written

QUICK = ("GATConv", "HEATConv", "PPFConv")


def test_the_page_has_every_convolution():
    names = set(theirs.__all__) - {"MessagePassing"}
    assert names == CASES.keys() | OTHERS.keys()
    outcomes = written()
    assert outcomes.keys() == CASES.keys()
    from pyg.conv_table import PAGE

    assert table(outcomes) in PAGE.read_text()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.fuzz) for name in sorted(CASES)]
)
def test_a_convolution_is_that_of_pyg(name):
    outcome, remark, off = tried(name)
    assert outcome == written()[name]
    assert off < 1e-8
    if outcome == REFUSED:  # with the line, and what to write there
        assert re.search(r"\.py:\d+ in \w+: ", remark), remark
        assert "Write instead: " in remark or "Use row-wise operations" in remark, remark
    if name == "GPSConv":
        assert "torch.where(mask" in remark and ".item()" not in remark, remark
