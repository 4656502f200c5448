"""GraphSAGE's convolution."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from joestar.graph_api import fn
from joestar.graph_api.computation import Computation
from joestar.nn.conv import Conv, checked_channels


class SAGEConv(Conv):
    """``W_l aggr_{j in N(i)} x_j + b + W_r x_i`` (Hamilton, Ying and Leskovec, 2017).

    Aggregates first, then multiplies, as PyG does. Keys: ``lin_l.*``, ``lin_r.weight``, ``lin.*`` with ``project``.

    Args:
        in_channels: features of a row, or a pair for sources and destinations.
        out_channels: features of a result row.
        aggr: ``"mean"``, ``"sum"`` (``"add"``), ``"max"``, ``"min"``, or a list of these, concatenated.
        normalize: scale every result row to length 1.
        root_weight: add the destination's own transformed row.
        project: first ``x_j <- relu(W x_j + b)`` (equation 3 of the paper).
        bias: learn an offset.
        **options: see ``Conv``.

    Raises:
        ConfigError: an unknown aggregation or option, impossible sizes.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        aggr: str | list[str] = "mean",
        normalize: bool = False,
        root_weight: bool = True,
        project: bool = False,
        bias: bool = True,
        **options: Any,
    ):
        in_channels, out_channels = checked_channels("SAGEConv", in_channels, out_channels)
        super().__init__(aggr, **options)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.normalize = normalize
        self.root_weight = root_weight
        self.project = project
        src, dst = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        if project:
            self.lin = nn.Linear(src, src)
        self.lin_l = nn.Linear(src * len(self.reduces), out_channels, bias=bias)
        if root_weight:
            self.lin_r = nn.Linear(dst, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        if self.project:
            self.lin.reset_parameters()
        self.lin_l.reset_parameters()
        if self.root_weight:
            self.lin_r.reset_parameters()

    def forward(self, block: Computation, x: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
        """``[num_src, in]`` (or a pair, see ``Conv``) to ``[num_dst, out]``."""
        x_src, x_dst = self.rows(block, x)
        if self.project:
            x_src = self.lin(x_src).relu()
        out = self.lin_l(self.aggregate(block, fn.copy_u(x_src)))
        if self.root_weight and x_dst is not None:
            out = out + self.lin_r(x_dst)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, aggr={self.aggr})"
