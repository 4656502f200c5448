"""Graphs of which copies are kept: what is written to them after that would be seen here and not there."""

from torch import Tensor

from joestar.errors import ChangedAfterCompileError
from joestar.graph_api import Graph
from joestar.runtime.seeds import version


class Written:
    """Notices writes in place to a graph's tensors, as PyTorch counts them."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._versions = self._now()

    def _now(self) -> dict[str, int | None]:
        graph = self.graph
        tensors: dict[str, Tensor] = {"graph.indptr": graph.indptr, "graph.indices": graph.indices}
        tensors |= {f"graph.ndata[{name!r}]": value for name, value in graph.ndata.items()}
        tensors |= {f"graph.edata[{name!r}]": value for name, value in graph.edata.items()}
        return {name: version(value) for name, value in tensors.items()}

    def check(self) -> None:
        """Raises ``ChangedAfterCompileError`` if anything was written since."""
        for name, found in self._now().items():
            if name in self._versions and self._versions[name] != found:
                raise ChangedAfterCompileError(
                    f"{name} was written to after compile, and rows of it are kept on the model's device: steps would "
                    "read old and new ones. Call joestar.compile again."
                )
