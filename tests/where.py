"""Where random programs run: on the device that ``JOESTAR_TEST_DEVICE`` names (``cuda``), else on a CPU."""

import contextlib
import os

import torch

DEVICE = torch.device(os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])


def here() -> contextlib.AbstractContextManager:
    """Tensors are made on ``DEVICE`` within, unless something else is said."""
    return contextlib.nullcontext() if DEVICE.type == "cpu" else DEVICE


def on_host() -> contextlib.AbstractContextManager:
    """Within ``here``: tensors are made on the host, as what draws from a generator of the host needs."""
    return contextlib.nullcontext() if DEVICE.type == "cpu" else torch.device("cpu")
