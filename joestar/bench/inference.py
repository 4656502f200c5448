"""``joestar bench inference``: exact logits of every node, from all neighbours, against the bytes that must move."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from joestar.bench.measure import PeakMemory, Timing, check_words, time_steps
from joestar.bench.profile import copy_bandwidth
from joestar.bench.setting import PRECISIONS, Setting, check_device, machine
from joestar.bench.step import graph_of, network, orders
from joestar.runtime.inference import Inference
from joestar.runtime.rows import ALL, ROW
from joestar.runtime.stages import Plan
from joestar.runtime.values import Value, row_bytes


@dataclass
class Row:
    """What was measured of one model.

    Attributes:
        run: milliseconds for all nodes; capture_seconds: before the first run. memory: peak in bytes.
        gathered_bytes: what moves if every aggregation reads a row per edge, and rows of nodes move once per stage;
        unique_bytes: if it reads each row once, as with a cache that holds all of them.
        stages: of the plan.
    """

    model: str
    ids: str
    run: Timing
    capture_seconds: float
    memory: int
    gathered_bytes: int
    unique_bytes: int
    stages: int


def run(setting: Setting, memory_budget: int | None = None, say: Callable[[str], None] = lambda text: None) -> dict:
    """Measures every model of the setting (``fanouts``: as many layers); a dictionary that is JSON.

    Raises:
        ConfigError: for unknown names, a GPU that is not there, or a budget that is too small.
    """
    setting.check()
    check_words(precision=([setting.precision], PRECISIONS))
    device = check_device(setting.device)
    torch.backends.cuda.matmul.allow_tf32 = setting.precision != "fp32"
    speed, rows = copy_bandwidth(device), []
    for ids in orders(setting):
        graph = graph_of(ids, device, setting)
        say(f"{graph!r}")
        for model in setting.models:
            row = _row(model, ids, graph, setting, memory_budget)
            rows.append(row)
            say(f"{model:5}{row.run.median:10.1f} ms, {row.gathered_bytes / speed * 1e3:.1f} ms at the speed of a copy")
        del graph
    return {
        "machine": machine(device), "setting": asdict(setting), "copy_bytes_per_second": speed,
        "memory_budget": memory_budget, "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def _row(model: str, ids: str, graph, setting: Setting, memory_budget: int | None) -> Row:
    net = network(model, graph, setting)
    memory, start = PeakMemory(graph.device), time.perf_counter()
    autocast = torch.bfloat16 if setting.precision == "bf16" else None
    inference = Inference(net, graph, len(setting.fanouts), autocast)
    captured = time.perf_counter() - start

    def once() -> Tensor:
        return inference.run(memory_budget=memory_budget, progress=False)

    once()
    memory.forget()
    timing = time_steps(once, setting.steps, setting.warm_up, graph.device)
    gathered, unique = traffic(inference.plan)
    return Row(model, ids, timing, captured, memory.bytes(), gathered, unique, len(inference.plan.stages))


def traffic(plan: Plan) -> tuple[int, int]:
    """Bytes that must move: (a row per edge for every aggregation, each row once). See ``Row``.

    Per stage: rows that aggregations read, ids and offsets of edges, values of edges that the graph has, rows of nodes
    that are read beside, and what is kept.
    """
    gathered = unique = 0
    for stage in plan.stages:
        inside, beside = set(stage.order), set()
        for value in stage.order:
            for operand, how in plan.needs(value):
                if how is ALL and operand.space is not None:
                    unique += _bytes(operand)
                    gathered += _edges(value, plan) * row_bytes(operand.meta)
                elif operand not in inside and (how is ROW or operand is value.args[0]):
                    beside.add(operand)
        once = sum(map(_bytes, beside | set(stage.outputs)))
        gathered, unique = gathered + once, unique + once
    return gathered, unique


def _edges(value: Value, plan: Plan) -> int:
    """Rows that a value gathers."""
    ids = next((operand for operand, how in plan.needs(value) if how is ROW), value)
    return (ids if value.edges is None or ids.space is value.edges else value).num_rows


def _bytes(value: Value) -> int:
    """Of all rows; of tensors without rows, those of the graph's structure count."""
    rows = value.tensor.shape[0] if value.tensor is not None and value.tensor.dim() else value.num_rows
    return rows * row_bytes(value.meta)
