"""Memsets of CUDA graphs become kernels: what CUDA's driver is asked for, played by one that keeps a graph."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from joestar.cuda_driver import Driver
from joestar.runtime import graph_nodes
from joestar.runtime.graph_nodes import SIGNATURES, _Kernel, _Memset, exchange_memsets

KERNEL, MEMCPY, MEMSET = 0, 1, 2
GRAPH, FILLED = 7, 8


class Playing:
    """Functions of the driver as C sees them, over graphs of Python: ``graphs`` maps handles to lists of nodes,
    ``kinds`` and ``given`` nodes to what they are, ``edges`` are pairs; ``fails`` names functions that do not work."""

    def __init__(self, kinds: dict, edges: set, given: dict, fails=()):
        self.kinds, self.edges, self.given, self.fails = {**kinds, 900: KERNEL}, set(edges), given, fails
        self.graphs = {GRAPH: list(kinds), FILLED: [900]}
        for name, types in SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._played(name)))

    def _played(self, name):
        def play(*given):
            own = re.sub("([A-Z])", r"_\1", name.removeprefix("cuGraph").removesuffix("_v2")).lower()
            return 801 if name in self.fails else getattr(self, own)(*given) or 0

        return play

    def _list(self, nodes, into, count):
        if into:
            for i, node in enumerate(nodes):
                into[i] = node
        count[0] = len(nodes)

    def _get_nodes(self, graph, into, count):
        self._list(self.graphs[graph], into, count)

    def _node_get_type(self, node, kind):
        kind[0] = self.kinds[node]

    def _node_get_dependencies(self, node, into, count):
        self._list(sorted(a for a, b in self.edges if b == node), into, count)

    def _node_get_dependent_nodes(self, node, into, count):
        self._list(sorted(b for a, b in self.edges if a == node), into, count)

    def _memset_node_get_params(self, node, found):
        found[0] = self.given[node]

    def _kernel_node_get_params(self, node, found):
        found[0] = _Kernel(function=node + 1, block=(128, 1, 1))

    def _add_kernel_node(self, new, graph, before, count, kernel):
        node = 1000 + len(self.kinds)
        self.kinds[node], self.given[node] = KERNEL, (kernel[0].function, kernel[0].block[0])
        self.graphs[graph].append(node)
        self.edges |= {(before[i], node) for i in range(count)}
        new[0] = node

    def _add_dependencies(self, graph, before, behind, count):
        self.edges |= {(before[i], behind[i]) for i in range(count)}

    def _destroy_node(self, node):
        self.graphs[GRAPH].remove(node)
        self.edges = {edge for edge in self.edges if node not in edge}


@pytest.fixture(autouse=True)
def tensors(monkeypatch):
    """Tensors at addresses are notes of what was asked for."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(graph_nodes, "tensor_at", lambda *given: SimpleNamespace(given=given))


def exchanged(driver):
    recorded = []

    def record(rows, value):
        recorded.append((*rows.given[:3], value))
        return SimpleNamespace(raw_cuda_graph=lambda: FILLED)

    return exchange_memsets(Driver(SIGNATURES, driver), GRAPH, record), recorded


def memset(**fields):
    return _Memset(**{"address": 4096, "pitch": 0, "value": 0, "size": 1, "width": 100, "height": 1, **fields})


DIAMOND = {(1, 2), (5, 2), (2, 3), (2, 4), (3, 6), (4, 6)}


def test_a_kernel_takes_the_place_of_a_memset():
    driver = Playing(dict.fromkeys((1, 3, 4, 5, 6), KERNEL) | {2: MEMSET}, DIAMOND, {2: memset(value=1, size=4)})
    count, recorded = exchanged(driver)
    assert count == 1 and recorded == [(4096, (100,), torch.int32, 1)]
    (new,) = set(driver.graphs[GRAPH]) - {1, 3, 4, 5, 6}
    assert driver.given[new] == (901, 128)
    assert driver.edges == {(1, new), (5, new), (new, 3), (new, 4), (3, 6), (4, 6)}


def test_without_neighbours():
    driver = Playing({2: MEMSET}, set(), {2: memset()})
    assert exchanged(driver)[0] == 1 and 2 not in driver.graphs[GRAPH] and not driver.edges


@pytest.mark.parametrize(
    "given",
    [
        {"height": 2}, {"width": graph_nodes.LARGEST + 1}, {"width": graph_nodes.LARGEST // 2, "size": 4}, {"size": 8},
        {"size": 2, "value": 40_000},
    ],
)  # fmt: skip
def test_what_stays_a_memset(given):
    driver = Playing({1: KERNEL, 2: MEMSET, 3: MEMCPY}, {(1, 2), (2, 3)}, {2: memset(**given)})
    assert exchanged(driver) == (0, [])
    assert driver.graphs[GRAPH] == [1, 2, 3] and driver.edges == {(1, 2), (2, 3)}


def test_numbers_of_every_size():
    for size, value, expected in ((1, 255, 255), (2, 7, 7), (4, 2**32 - 1, -1), (4, 2**31, -(2**31))):
        driver = Playing({2: MEMSET}, set(), {2: memset(size=size, value=value)})
        (found,) = exchanged(driver)[1]
        assert found[3] == expected
        torch.zeros(1, dtype=found[2]).fill_(expected)  # it can hold it


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_driver_that_refuses_leaves_the_graph_as_it_does_its_work(name):
    driver = Playing(dict.fromkeys((1, 3, 4, 5, 6), KERNEL) | {2: MEMSET}, DIAMOND, {2: memset()}, fails=[name])
    with pytest.raises(OSError, match=f"{name}: CUDA error 801"):
        exchanged(driver)
    if name != "cuGraphDestroyNode":  # both fill then: in front of the same nodes, behind the same
        assert sorted(driver.graphs[GRAPH]) == [1, 2, 3, 4, 5, 6] and driver.edges == DIAMOND


def test_a_tensor_that_several_kernels_fill_is_left():
    driver = Playing({2: MEMSET}, set(), {2: memset()})
    driver.graphs[FILLED] = [900, 900]
    with pytest.raises(OSError, match="one kernel"):
        exchanged(driver)
    assert driver.graphs[GRAPH] == [2]


def test_a_driver_without_these_functions():
    with pytest.raises(OSError, match="cuGraphGetNodes: CUDA's driver has no such function"):
        exchange_memsets(Driver(SIGNATURES, SimpleNamespace()), GRAPH, None)
