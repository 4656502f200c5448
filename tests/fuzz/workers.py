"""What the processes of ``python -m fuzz --workers 2`` run; they cannot find what is in ``__main__``."""

import logging

import torch

from .execute import Report, run_pack


def quiet() -> None:
    """At the start of a process: one thread, and no log of traces."""
    torch.set_num_threads(1)
    logging.getLogger("torch.__trace").handlers = []


def whole_pack(pack: int) -> Report:
    """What became of the programs of a pack, run in every way."""
    report = Report(thorough=True)
    run_pack(pack, report)
    torch._dynamo.reset()  # what its caches hold on to grows with every capture
    return report
