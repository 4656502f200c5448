"""Captures trace every step as structured logs, which pytest's handlers would format: that is switched off here."""

import logging

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def quiet():
    """No structured traces, and one thread: the tensors are tiny."""
    log, threads = logging.getLogger("torch.__trace"), torch.get_num_threads()
    handlers, log.handlers = log.handlers, []
    log.addHandler = lambda handler: None  # pytest 9 adds its own in front of every test
    torch.set_num_threads(1)
    yield
    del log.addHandler
    log.handlers = handlers
    torch.set_num_threads(threads)
