"""Memory of an arena whose loads go on: nobody else gets it before. With streams that are made up, on a CPU."""

import contextlib
import types

import pytest
import torch

from joestar.errors import StageError
from joestar.sampling import NeighborSampler
from joestar.stages.arena import Arena, Source
from joestar.stages.device_history import DeviceHistory
from joestar.stages.large_batch import LargeBatch

from .support import random_graph


def arena_and_macro(monkeypatch):
    graph = random_graph()
    graph.ndata["x"] = torch.rand(graph.num_nodes, 3)
    sources = {"x": Source(graph.ndata["x"], torch.float32, True)}
    macro = LargeBatch(16).sample(graph, NeighborSampler(graph, [3, 2]), torch.arange(16), (0, 0, 0))
    arena = Arena(graph, "cpu", torch.arange(2, dtype=torch.int32), 2 * graph.num_nodes, graph.num_edges, sources)
    made = arena.prepare(macro)
    log = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append((tensor.data_ptr(), stream)))
    return arena, made, log


def with_streams(monkeypatch, arena) -> None:
    arena._stream, arena._beside = "bus", "beside"
    monkeypatch.setattr(arena, "_on", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(arena, "_event", lambda: None)
    monkeypatch.setattr(arena, "_brought", lambda name, tensor: tensor)


def test_ids_and_slots_are_kept_for_the_bus_before_it_reads_them(monkeypatch):
    """Also if the load is given up while it waits for other ranks."""
    arena, made, log = arena_and_macro(monkeypatch)
    with_streams(monkeypatch, arena)
    filled = []

    def fill(ids, slots):
        filled.extend([(ids.data_ptr(), "bus"), (slots.data_ptr(), "bus")])
        assert set(filled) <= set(log)

    def given_up(*given):
        raise StageError("the arena's gate was closed.")

    monkeypatch.setattr(arena, "_fill_far", fill)
    arena.exchange, made.history = types.SimpleNamespace(load=given_up), object()
    with pytest.raises(StageError, match="gate was closed"):
        arena.load(made)
    assert filled


def test_hidden_rows_wait_for_the_steps_before_and_not_for_features(monkeypatch):
    arena, made, _ = arena_and_macro(monkeypatch)
    with_streams(monkeypatch, arena)
    current, done = [], []

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def bring(history, stopped):
        done.append((current[-1], "hidden rows"))
        return 7

    monkeypatch.setattr(arena, "_on", on)
    monkeypatch.setattr(arena, "_wait", lambda *events: done.extend((current[-1], event) for event in events if event))
    monkeypatch.setattr(arena, "_event", lambda: f"event of {current[-1]}")
    monkeypatch.setattr(arena, "_fill_far", lambda ids, slots: done.append((current[-1], "features")))
    monkeypatch.setattr(arena, "_build", lambda *given: (done.append((current[-1], "structure")), {}, "built"))
    arena.exchange, made.history = types.SimpleNamespace(load=bring), object()
    arena._read, arena._in_use = "steps that read", "shown"
    loaded = arena.load(made)
    assert done == [
        ("bus", "event of beside"), ("bus", "steps that read"), ("bus", "features"),
        ("beside", "shown"), ("beside", "hidden rows"), ("beside", "structure"), ("bus", "built"),
    ]  # fmt: skip
    assert loaded.bytes >= 7


def test_tables_are_kept_for_both_streams(monkeypatch):
    kept = []
    monkeypatch.setattr(Arena, "_read_on", staticmethod(lambda streams, *tables: kept.append((len(streams), tables))))
    arena, _, _ = arena_and_macro(monkeypatch)
    ((streams, tables),) = kept
    graph, read = arena.graph, {table.data_ptr() for table in tables}
    written = graph.ndata["x"], graph.edata["w"], graph.ids, graph.whole_degrees, *arena._next
    assert streams == 2 and {table.data_ptr() for table in written} <= read


def test_tables_of_hidden_rows_are_kept_for_the_stream_beside(monkeypatch):
    """Loads write them behind what has made them, and nobody else gets their memory while a load goes on."""
    arena, _, log = arena_and_macro(monkeypatch)
    waits = []
    beside = arena._beside = types.SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "steps'")
    history = DeviceHistory(9, (3, 4), (5, 2), (6, 3), torch.float32, "cpu")
    arena.bring_history(types.SimpleNamespace(device=history))
    found = [*vars(history).values(), *vars(history.tables).values()]
    tables = [each for value in found for each in (value if isinstance(value, list) else [value])]
    tables = [each for each in tables if isinstance(each, torch.Tensor)]
    assert waits == ["steps'"] and len(tables) == 12
    assert sorted(log, key=str) == sorted(((table.data_ptr(), beside) for table in tables), key=str)


def test_each_of_them_for_each_stream(monkeypatch):
    arena, _, log = arena_and_macro(monkeypatch)
    one, other = torch.zeros(1), torch.zeros(1)
    arena._read_on(("bus", None, "beside"), one, other)
    assert log == [(tensor.data_ptr(), stream) for stream in ("bus", "beside") for tensor in (one, other)]


def test_a_load_within_inference_mode_leaves_no_inference_tensors():
    graph = random_graph()
    macro = LargeBatch(16).sample(graph, NeighborSampler(graph, [3, 2]), torch.arange(16), (0, 0, 0))
    arena = Arena(graph, "cpu", torch.arange(2, dtype=torch.int32), 2 * graph.num_nodes, graph.num_edges, {})
    made = arena.prepare(macro)
    with torch.inference_mode():
        loaded = arena.load(made)
    assert not loaded.seeds.is_inference() and not any(t.is_inference() for t in loaded.edata.values())
