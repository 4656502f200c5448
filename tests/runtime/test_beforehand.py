"""A quick first step: a patient collector of garbage, and Inductor's needs found while the program is traced."""

import gc
import os
import threading

import pytest
import torch
from torch._inductor import codecache, cpu_vec_isa
from torch._inductor.codegen.common import KernelTemplate

from joestar.garbage import PATIENT, Collections, FewerCollections, fewer_collections
from joestar.kernels.digest import source_digest
from joestar.locks import TRACING
from joestar.runtime import beforehand
from joestar.runtime.program import Program
from tests.runtime.common import make_step, planted_graph

USUAL = (1500, 15, 15)


@pytest.fixture(autouse=True)
def usual():
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_the_last_block_to_end_restores_the_thresholds():
    with fewer_collections:
        with TRACING:
            assert gc.get_threshold() == PATIENT
        assert gc.get_threshold() == PATIENT
    assert gc.get_threshold() == USUAL
    first, second = fewer_collections.__enter__(), fewer_collections.__enter__()
    thread = threading.Thread(target=first.__exit__)
    thread.start()
    thread.join()
    assert gc.get_threshold() == PATIENT
    second.__exit__()
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 0, 0), (PATIENT[0] + 1, 3, 3)], ids=["off", "more patient"])
def test_other_settings_are_left_alone(own):
    gc.set_threshold(*own)
    with fewer_collections:
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
    with fewer_collections:
        gc.set_threshold(*USUAL)
    assert gc.get_threshold() == USUAL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_not_within():
    apart = FewerCollections()
    with apart:
        child = os.fork()
        if child == 0:
            apart.__exit__()  # as the block of the thread that forked does
            with apart:
                within = gc.get_threshold() == PATIENT
            os._exit(0 if within and gc.get_threshold() == USUAL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_search_of_the_whole_heap_before_the_first_loss(monkeypatch):
    """Neither Python's own, nor the one that Dynamo makes after a capture; whether it succeeds or not."""
    seen, searches = [], []
    monkeypatch.setattr(Program, "_capture", _seeing(Program._capture, seen))

    def search(phase, info):
        if phase == "start" and info["generation"] > 0:
            searches.append(info)

    gc.callbacks.append(search)
    gc.set_threshold(700, 1, 1)
    try:
        epoch = make_step(graph=planted_graph()).epoch(torch.arange(60), 20)
        searches.clear()
        next(epoch)
        assert seen == [PATIENT] and not searches
        assert gc.get_threshold() == (700, 1, 1)
        broken = make_step(graph=planted_graph())
        monkeypatch.setattr(Program, "_capture", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(broken.epoch(torch.arange(60), 20))
        assert gc.get_threshold() == (700, 1, 1)
    finally:
        gc.callbacks.remove(search)


def _seeing(capture, seen: list):
    def captured(*args):
        seen.append(gc.get_threshold())
        return capture(*args)

    return captured


def test_templates_are_compiled_when_they_are_used():
    now = KernelTemplate._template_from_string
    with beforehand.templates_later():
        right, wrong = (KernelTemplate._template_from_string(text) for text in ("{{a}} + {{b}}", "{% for %}"))
    assert KernelTemplate._template_from_string is now
    assert right.render(a=1, b=2) == now("{{a}} + {{b}}").render(a=1, b=2) == "1 + 2"
    with pytest.raises(Exception, match="Error in template"):
        wrong.render()


def test_what_keys_are_made_of_is_found_beside_the_trace():
    """Once; what Inductor asks is answered already."""
    begun = beforehand.begin("cpu")
    beforehand.finish(torch.device("cpu"))
    assert all(each.done() for each in begun) and beforehand.begin("cpu") is begun
    results = [each.result() for each in begun]
    assert results[0] is cpu_vec_isa.valid_vec_isa_list() and results[1] is source_digest()
    assert results[2] is codecache.torch_key()
    assert len(beforehand.begin("meta")) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_for_no_thread_of_its_parent():
    before = beforehand.begin("cpu")
    child = os.fork()
    if child == 0:
        beforehand.finish(torch.device("cpu"))
        os._exit(0 if beforehand.begin("cpu") is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert beforehand.begin("cpu") is before


def test_a_search_before_a_first_recording_leaves_what_is_old():
    found = []

    def search(phase, info):
        if phase == "start":
            found.append(info["generation"])

    apart = Collections()
    gc.callbacks.append(search)
    try:
        apart.collect()
        apart.collect()
    finally:
        gc.callbacks.remove(search)
    assert found == [1, 2]


def test_without_inductor_nothing_begins(monkeypatch):
    monkeypatch.setattr(beforehand, "begin", lambda device: pytest.fail("begun"))
    step = make_step(graph=planted_graph(), backend="eager")
    assert len(list(step.epoch(torch.arange(60), 20))) == 3
