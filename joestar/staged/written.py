"""Graphs of which copies are kept: what is written to them or put in their place after that would be seen here and not
there.

PyTorch counts writes in place. What is written through NumPy, ``.data`` or another map of the same file it does not
count: some rows of every tensor are compared, small tensors wholly.
"""

import zlib

import torch
from torch import Tensor

from joestar.errors import ChangedAfterCompileError
from joestar.graph_api import Graph
from joestar.runtime.seeds import version

SAMPLED_BYTES = 2**16
"""Of every tensor that are compared."""
SAMPLED_ROWS = 256


class Written:
    """Notices writes in place to a graph's tensors, and other tensors in their place.

    Args:
        graph: in host memory. hot: ids of nodes whose rows are kept elsewhere for good, ``[H]``: half of the rows that
            are compared are theirs.
    """

    def __init__(self, graph: Graph, hot: Tensor | None = None):
        self.graph = graph
        self._hot = torch.empty(0, dtype=torch.int64, device="cpu") if hot is None else hot.long().cpu()
        self._places = {name: _place(value) for name, value in self._tensors().items()}
        self._versions = {name: version(value) for name, value in self._tensors().items()}
        self._rows = {name: self._sample(name, value) for name, value in self._tensors().items()}
        self._sums = {name: _checksum(value, self._rows[name]) for name, value in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        graph = self.graph
        tensors: dict[str, Tensor] = {"graph.indptr": graph.indptr, "graph.indices": graph.indices}
        tensors |= {f"graph.ndata[{name!r}]": value for name, value in graph.ndata.items()}
        return tensors | {f"graph.edata[{name!r}]": value for name, value in graph.edata.items()}

    def _sample(self, name: str, value: Tensor) -> Tensor | None:
        """Rows to compare, ascending: hot ones and others, spread; ``None`` for all."""
        row = max(1, value[:1].numel() * value.element_size())
        if value.shape[0] * row <= SAMPLED_BYTES:
            return None
        count = max(2, min(SAMPLED_ROWS, SAMPLED_BYTES // row))
        hot = _spread(self._hot.numel(), count // 2) if "ndata" in name else _spread(0, 0)
        others = _spread(value.shape[0], count - hot.numel())
        return torch.cat([self._hot[hot], others]).unique()

    def check(self, contents: bool = True) -> None:
        """Raises ``ChangedAfterCompileError`` if anything was written since.

        Args:
            contents: look at rows, too, in some 0.1 ms.
        """
        tensors = self._tensors()
        for name in self._versions:
            if name not in tensors:
                raise _changed(name, "was removed after compile")
            value = tensors[name]
            if self._places[name] != _place(value):
                raise _changed(name, "was replaced by another tensor after compile")
            if self._versions[name] != version(value):
                raise _changed(name, "was written to after compile")
            if contents and self._sums[name] != _checksum(value, self._rows[name]):
                raise _changed(name, "was written to after compile, through NumPy, .data or another program")


def _changed(name: str, how: str) -> ChangedAfterCompileError:
    return ChangedAfterCompileError(
        f"{name} {how}, and rows of it are kept on the model's device: steps would read old and new ones. Call "
        "joestar.compile again."
    )


def _place(value: Tensor) -> tuple:
    """Where a tensor lies and how it is read."""
    return value.data_ptr(), value.dtype, *value.shape, *value.stride()


def _spread(number: int, count: int) -> Tensor:
    """At most ``count`` of ``[0, number)``, ascending, both ends among them."""
    return torch.linspace(0, max(0, number - 1), min(number, count), dtype=torch.float64, device="cpu").long()


@torch.no_grad()
def _checksum(value: Tensor, rows: Tensor | None) -> int:
    value = value.detach() if rows is None else value.detach().index_select(0, rows)
    return zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy()) if value.numel() else 0
