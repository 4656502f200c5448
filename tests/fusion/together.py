"""Many small models in one capture, each then a program of its own: a capture is most of what a test costs."""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import kinds
import torch
from captures import Real, no_quick_ones, traced
from lowering.harness import Case, same
from torch.fx._lazy_graph_module import _LazyGraphModule

from joestar.graph_api import SamplingContext
from joestar.lowering.capture import Captured, capture
from joestar.lowering.functional import is_in_place
from joestar.lowering.inputs import known_inputs
from joestar.lowering.traced_norms import traced_norms
from joestar.lowering.verify import verify_capture
from joestar.profile.sizes import measure
from joestar.runtime.options import Options
from joestar.runtime.program import Program


class Cut(Program):
    """A program whose capture was made together with others."""

    def __init__(self, case: Case, captured: Captured):
        super().__init__("train", case.model, case.sampler, case.loss, Options("eager", case.disable))
        self._made = captured

    def _capture(self, seeds, labels):
        self._check_outputs(self._made.gm, "Model")
        return self._made


def cases_together(models: dict, **options) -> dict[str, Case]:
    """A case for every model, captured at once; options are ``Case``'s (one graph, one sampler)."""
    cases = {name: Case(model, **options) for name, model in models.items()}
    for case in cases.values():
        case.model.train()
    first = next(iter(cases.values()))
    _, labels = measure(first.sampler, first.graph, first.seeds(), first.key(0))
    graph, sampler, seeds = first.graph, first.sampler, first.seeds()
    given = list(cases.values()), graph, sampler, seeds, labels
    whole = _real(*given) if no_quick_ones() else _quick(*given)
    if not isinstance(whole, Real):
        brought = [kinds.kind_of(case.program, seeds, labels, whole.gm) for case in cases.values()]
        whole = kinds.compared(brought, whole, lambda: _real(*given))
    for position, case in enumerate(cases.values()):
        case.graph, case.sampler = graph, sampler
        case.program = Cut(case, _part(whole, position))
    return cases


def _quick(cases: list[Case], graph, sampler, seeds, labels: list[str]) -> Captured:
    """By ``make_fx`` at once (``captures.py``); a capture where that cannot be."""
    models = torch.nn.ModuleList(case.model for case in cases)
    program = SimpleNamespace(graph=graph, sampler=sampler, model=models)

    def results(context, graph, blocks, seeds) -> tuple:
        return _results(cases, blocks, graph.ndata["x"], graph.ndata["y"], seeds)

    with contextlib.suppress(Exception):  # the capture says what is wrong
        with traced_norms():
            made = traced(program, seeds, labels, results)
        verify_capture(made.gm, "Model")
        return made
    return _real(cases, graph, sampler, seeds, labels)


def _real(cases: list[Case], graph, sampler, seeds, labels: list[str]) -> Captured:
    features, targets = graph.ndata["x"], graph.ndata["y"]  # the names that inputs get

    def program(seeds, key, carriers):
        context = SamplingContext(key, [carrier.shape[0] for carrier in carriers])
        blocks = sampler.sample(graph.with_context(context), seeds)
        return _results(cases, blocks, features, targets, seeds)

    known = known_inputs(graph, torch.nn.ModuleList(case.model for case in cases))
    return Real(**vars(capture(program, seeds, labels, origin="Model with Sampler", known=known)))


def _results(cases: list[Case], blocks, features, targets, seeds) -> tuple:
    """(loss, outputs) of every case."""
    x = torch.index_select(features, 0, blocks[0].srcs)
    y = torch.index_select(targets, 0, seeds)
    results = []
    for case in cases:
        logits = case.model(blocks, x)
        results += [case.loss(logits, y), logits]
    return tuple(results)


def captured_together(models: dict, fanouts=(3, 2), **options) -> dict[str, Case]:
    """``cases_together``, traced: each is as ``graphs.captured`` makes it, but for the names of parameters."""
    cases = cases_together(models, fanouts=fanouts, **options)
    for case in cases.values():
        case.trace()
    return cases


def one_of(models: dict, **options) -> Callable[[str], Case]:
    """A case by name, made as ``make()`` of (``make``, anything): all are captured together when one is asked for."""

    @functools.cache
    def every() -> dict[str, Case]:
        return captured_together({name: make() for name, (make, _) in models.items()}, **options)

    return lambda name: every()[name]


def _part(whole: Captured, position: int) -> Captured:
    graph = copy.deepcopy(whole.gm.graph)
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(output.args[0][2 * position : 2 * position + 2]),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or is_in_place(node))
    return Captured(_LazyGraphModule(whole.gm, graph), list(whole.roles), list(whole.labels))


def check_each(cases: dict[str, Case], batches, plain: bool = True, tolerance: float = 1e-10) -> list[str]:
    """What differs from plain Python (from the program without passes, where masks are keyed) in any case and batch.

    Every program runs exactly, padded, and on the first batch under every other choice that it offers.
    """
    found = []
    for name, case in cases.items():
        try:
            runs, reference = _runs(case, plain)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for step, batch in enumerate(batches):
            expected = reference(case.seeds(batch), step)
            for how, run in runs.items() if step == 0 else list(runs.items())[:2]:
                try:
                    same(run(case.seeds(batch), step), expected, tolerance)
                except Exception as error:
                    found.append(f"{name}, {how}, batch {list(batch)}: {type(error).__name__}: {error}")
    return found


def _runs(case: Case, plain: bool) -> tuple[dict, object]:
    """(ways to run a case, the reference)."""
    case.trace()
    options = case.program.options
    runs = {"exact": case.exact, "padded": case.padded}
    for site in case.program.sites:
        for option in set(site.options) - {site.taken}:
            runs[f"{site.key} = {option}"] = _as(case, replace(options, choices={site.key: option})).exact
    if plain:
        return runs, case.eager
    every = tuple(record.name for record in case.program.passes)
    return runs, _as(case, replace(options, disable_passes=every)).exact


def _as(case: Case, options: Options) -> Case:
    other = copy.copy(case)
    other.program = case.program.variant(options, texts=False)
    return other
