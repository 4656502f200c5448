"""What tests of partitions have in common; modules with another graph define their own."""

import pytest

import joestar
from tests.runtime.partitioned import PARTS, drawn_graph


@pytest.fixture(scope="module")
def graph():
    """At random, see ``drawn_graph``."""
    return drawn_graph()


@pytest.fixture(scope="module")
def parts(graph):
    """Of that graph."""
    return joestar.partition(graph, PARTS, passes=2)
