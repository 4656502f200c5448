"""Kernels of a GPU on tensors of the CPU."""

import torch


def moved(value, device: str):
    """The tensor, or those of a list or tuple; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(moved(entry, device) for entry in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def on_gpu(function):
    """``function`` of the arguments' copies on the GPU; results on the CPU."""
    return lambda *args: moved(function(*(moved(value, "cuda") for value in args)), "cpu")
