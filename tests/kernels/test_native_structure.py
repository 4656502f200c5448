import pytest
import torch
from native_support import IDS, edges, random_csc, same

from joestar.kernels import cpu
from joestar.ops import reference


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("tail", [0, 6])
def test_rows_and_degrees(ids, tail, any_threads):
    indptr, indices = random_csc(300, 200, dtype=ids, tail=tail)
    rows = any_threads(lambda: cpu.edge_dst(indptr, indices.numel(), indices))
    expected = [row for _, row, _ in edges(indptr, indices)]
    assert rows.tolist() == expected + [0] * tail
    assert rows.dtype == ids
    degrees = any_threads(lambda: cpu.out_degrees(indptr, indices, 210))
    sources = torch.tensor([source for source, _, _ in edges(indptr, indices)])
    assert torch.equal(degrees, torch.bincount(sources, minlength=210))


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("tail", [0, 6])
def test_self_loops(ids, tail, any_threads):
    indptr, indices = random_csc(100, 100, dtype=ids, tail=tail)
    indptr = torch.cat([indptr, indptr[-1:].expand(5)])  # five padding rows
    got = any_threads(lambda: cpu.add_self_loops(indptr, indices, torch.tensor(100)))
    rows = [[int(s) for s in indices[indptr[i] : indptr[i + 1]] if s != i] + [i] for i in range(100)] + [[]] * 5
    flat = [source for row in rows for source in row]
    assert (got[0][1:] - got[0][:-1]).tolist() == [len(row) for row in rows]
    assert got[1].tolist() == flat + [0] * (indices.numel() + 105 - len(flat))
    assert same(got, reference.add_self_loops(indptr, indices, torch.tensor(100)))


def test_many_edges(any_threads):
    indptr, indices = random_csc(20_000, 300, mean=8)
    assert same(any_threads(lambda: cpu.out_degrees(indptr, indices, 300)), reference.out_degrees(indptr, indices, 300))
    rows = any_threads(lambda: cpu.edge_dst(indptr, indices.numel() + 9, indptr))
    assert same(rows, reference.edge_dst(indptr, indices.numel() + 9, indptr))


def test_nothing():
    indptr, indices = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    assert cpu.edge_dst(indptr, 3, indices).tolist() == [0, 0, 0]
    assert cpu.out_degrees(indptr, indices, 2).tolist() == [0, 0]
    assert [part.tolist() for part in cpu.add_self_loops(indptr, indices, torch.tensor(0))] == [[0], []]
