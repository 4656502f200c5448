"""Passes over the graph of forward and backward pass together, before the backend divides it."""

from torch import fx

from joestar.fusion.backend import gradients_together
from joestar.fusion.backend.compared import SaveCompared
from joestar.fusion.backend.overwritten import SaveOverwritten
from joestar.fusion.backend.recompute import RecomputeMasks
from joestar.torch_private import CustomGraphPass


class JointPasses(CustomGraphPass):
    """Those of a device, as the one that Inductor takes.

    Args:
        disabled: names of passes that are switched off.
    """

    def __init__(self, device: str, disabled: tuple[str, ...] = ()):
        self.passes: list[CustomGraphPass] = [SaveOverwritten(), SaveCompared()]
        self.passes += [RecomputeMasks()] * (device == "cpu")
        if device == "cuda" and gradients_together.NAME not in disabled:
            self.passes.append(gradients_together.GradientsTogether())

    def __call__(self, graph: fx.Graph) -> None:
        """Runs each."""
        for each in self.passes:
            each(graph)

    def uuid(self):
        """Identifies them in Inductor's cache of compiled graphs."""
        return b"".join(each.uuid() for each in self.passes)
