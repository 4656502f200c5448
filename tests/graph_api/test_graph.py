"""Queries, formats, views and transformations of a graph; blocks on their own."""

import copy
import pickle

import pytest
import torch

from joestar.errors import GraphError, SamplerError
from joestar.graph_api import Block, Graph, SamplingContext, check_blocks, fn

EDGES = torch.tensor([[2, 0, 2, 3, 0, 1], [2, 1, 0, 1, 1, 3]])


@pytest.fixture
def graph():
    """Five nodes, the last one isolated, with data, splits and a name."""
    graph = Graph.from_edge_index(EDGES, 5, {"x": torch.randn(5, 2)}, {"w": torch.arange(6.0)})
    graph.train_idx, graph.test_idx = torch.tensor([0, 2]), torch.tensor([4])
    graph.name, graph.num_classes, graph.multilabel = "toy", 3, True
    return graph


def _describes(view: Graph, graph: Graph) -> bool:
    """Whether the view has the graph's name, classes and splits."""

    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    names = ("name", "num_classes", "multilabel", "train_idx", "val_idx", "test_idx")
    return all(plain(getattr(view, name)) == plain(getattr(graph, name)) for name in names)


def test_degrees(graph):
    assert graph.in_degrees().tolist() == [1, 3, 1, 1, 0]
    assert graph.out_degrees().tolist() == [2, 1, 2, 1, 0]
    assert graph.in_degrees().dtype == graph.out_degrees().dtype == torch.int64
    for ids in (torch.int32, torch.int64):
        assert graph.in_degrees_of(torch.tensor([4, 1, 1], dtype=ids)).tolist() == [0, 3, 3]
    assert torch.equal(graph.graph_degrees("src"), graph.in_degrees())


def test_coo_and_csr_describe_the_same_edges(graph):
    src, dst, eid = graph.coo()
    assert list(zip(src.tolist(), dst.tolist(), strict=True)) == [(2, 0), (0, 1), (3, 1), (0, 1), (2, 2), (1, 3)]
    assert eid.tolist() == list(range(6))
    assert dst.dtype == src.dtype == graph.indices.dtype
    indptr, neighbours, position = graph.csr()
    assert indptr.tolist() == [0, 2, 3, 5, 6, 6]
    assert neighbours.tolist() == [1, 1, 3, 0, 2, 1]
    assert position.tolist() == [1, 3, 5, 0, 4, 2]
    assert torch.equal(dst[position], neighbours)


def test_formats_are_derived_once(graph):
    assert graph.coo() is graph.coo()
    assert graph.csr() is graph.csr()


def test_self_loops_are_one_per_node_at_the_end_of_its_row(graph):
    looped = graph.add_self_loops()
    assert looped.indptr.tolist() == [0, 2, 6, 7, 9, 10]
    assert looped.indices.tolist() == [2, 0, 0, 3, 0, 1, 2, 1, 3, 4]
    assert looped.num_edges == 10
    assert looped.ndata["x"] is graph.ndata["x"]
    assert not looped.edata
    assert _describes(looped, graph)
    again = looped.add_self_loops()
    assert torch.equal(again.indptr, looped.indptr)
    assert torch.equal(again.indices, looped.indices)


def test_a_view_keeps_its_key_through_a_transformation(graph):
    """Otherwise a sampler that adds self-loops would draw the same sample in every step."""
    view = graph.keyed(3, 1, 4)
    assert view.add_self_loops().context is view.context
    assert not graph.add_self_loops().has_context


def test_views(graph):
    assert not graph.has_context
    assert graph.context.key.tolist() == [0, 0, 0]
    view = graph.keyed(2**40, 3, 5)
    assert view.has_context
    assert view.context.key.tolist() == [2**40, 3, 5]
    assert (view.indptr is graph.indptr, view.ndata is graph.ndata, view.edata is graph.edata) == (True, True, True)
    assert _describes(view, graph)
    assert not graph.has_context
    context = SamplingContext(torch.tensor([1, 2, 3]), [7, 8])
    assert graph.with_context(context).context is context
    assert [context.next_size("a"), context.next_size("b")] == [7, 8]
    assert [context.next_site(), context.next_site()] == [0, 1]
    assert context.labels == ["a", "b"]
    with pytest.raises(IndexError):
        context.next_size("c")


def test_to(graph):
    assert graph.to("cpu") is graph
    assert graph.to(torch.device("cpu")) is graph
    moved = graph.to("meta")
    assert moved.device.type == "meta"
    tensors = [moved.indices, moved.ndata["x"], moved.edata["w"], moved.train_idx, moved.test_idx]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert (moved.name, moved.num_classes, moved.multilabel, moved.val_idx) == ("toy", 3, True, None)
    with pytest.raises(GraphError, match="5 nodes"):
        moved.ndata["z"] = torch.ones(4)
    assert graph.device.type == "cpu"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_copies_are_whole_graphs(graph, duplicate):
    twin = duplicate(graph)
    assert torch.equal(twin.indices, graph.indices)
    assert torch.equal(twin.ndata["x"], graph.ndata["x"])
    assert torch.equal(twin.edata["w"], graph.edata["w"])
    assert _describes(twin, graph)
    with pytest.raises(GraphError, match=r"ndata\['z'\] needs one row"):
        twin.ndata["z"] = torch.ones(4)


def test_repr(graph):
    assert repr(graph) == "Graph(toy: 5 nodes, 6 edges; x[5, 2])"
    big = Graph.from_csc(torch.zeros(12_346, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    assert repr(big) == "Graph(unnamed: 12,345 nodes, 0 edges; )"
    assert repr(graph[:, torch.tensor([1])].compact()) == "Block(num_src=3, num_dst=1, num_edges=3)"


@pytest.mark.parametrize("key", [0, slice(None), (slice(1, 2), torch.tensor([0])), (torch.tensor([0]), slice(2)), ()])
def test_what_is_no_slice_of_a_graph(graph, key):
    with pytest.raises(GraphError, match=r"graph\[:, dsts\], graph\[srcs, :\] or graph\[srcs, dsts\]"):
        graph[key]


BAD_DSTS = {
    "list": (["0", "1"], "dsts must hold numbers; got list of dtype <U1"),
    "number": (3, "got int"),
    "float": (torch.tensor([0.0]), "got torch.float32"),
    "mask": (torch.ones(5, dtype=torch.bool), "got torch.bool"),
    "2-d": (torch.zeros(1, 2, dtype=torch.int64), r"\[1, 2\]"),
    "too large": (torch.tensor([4, 5]), r"dsts\[1\] = 5 is not a node: ids must be in \[0, 5\)"),
    "negative": (torch.tensor([-1]), r"dsts\[0\] = -1 is not a node"),
    "device": (torch.tensor([1], device="meta"), "dsts are on meta and the graph on cpu"),
}


@pytest.mark.parametrize(("dsts", "message"), BAD_DSTS.values(), ids=BAD_DSTS.keys())
def test_destinations_that_are_no_nodes(graph, dsts, message):
    with pytest.raises(GraphError, match=message):
        graph[:, dsts]


# --- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_compact_takes_every_in_edge(graph, ids):
    block = graph[:, torch.tensor([1, 4, 1], dtype=ids)].compact()
    assert block.srcs.tolist() == [1, 4, 1, 0, 3]
    assert block.dsts.tolist() == [1, 4, 1]
    assert block.indptr.tolist() == [0, 3, 3, 6]
    assert block.indices.tolist() == [3, 4, 3, 3, 4, 3]
    assert {t.dtype for t in (block.srcs, block.dsts, block.indices)} == {graph.indices.dtype}
    assert (block.num_src, block.num_dst, block.num_edges) == (5, 3, 6)
    assert block.in_degrees().tolist() == [3, 0, 3]
    assert block.out_degrees().tolist() == [0, 0, 0, 4, 2]
    assert block.graph_degrees("src").tolist() == [3, 0, 3, 1, 1]
    assert block.graph_degrees("dst").tolist() == [3, 0, 3]


def test_self_loops_of_a_block(graph):
    block = graph[:, torch.tensor([2, 1])].compact().add_self_loops()
    assert block.srcs.tolist() == [2, 1, 0, 3]
    assert block.indptr.tolist() == [0, 1, 5]
    assert block.indices[: int(block.indptr[-1])].tolist() == [0, 2, 3, 2, 1]
    assert isinstance(block, Block)
    x = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    assert block.pull(fn.copy_u(x), "sum").tolist() == [1.0, 1210.0]


def test_check_blocks(graph):
    inner = graph[:, torch.tensor([1])].compact()
    outer = graph[:, inner.srcs].compact()
    check_blocks([outer, inner], "Sampler")
    check_blocks((inner,), "Sampler")
    for wrong in (None, [], [graph], inner, [outer, "block"]):
        with pytest.raises(SamplerError, match=r"Sampler.sample must return a non-empty list of joestar Blocks"):
            check_blocks(wrong, "Sampler")
    with pytest.raises(GraphError, match="block 0 has 1 destinations but block 1 has 4 sources"):
        check_blocks([inner, outer], "Sampler")


def test_blocks_of_other_nodes_do_not_fit(graph):
    """As many, but others: the rows of a hop would be taken for those of other nodes."""
    inner = graph[:, torch.tensor([1])].compact()
    others = inner.srcs.flip(0)
    with pytest.raises(SamplerError, match="destinations of block 0 are other nodes than the sources of block 1"):
        check_blocks([graph[:, others].compact(), inner], "Sampler", inner.dsts)
    check_blocks([graph[:, inner.srcs].compact(), inner], "Sampler", inner.dsts)
