"""The convolution of graph attention networks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from joestar.errors import ConfigError
from joestar.graph_api import fn
from joestar.graph_api.computation import Computation
from joestar.nn.conv import Conv, checked_channels, weighted
from joestar.nn.init import GlorotLinear, glorot, zeros
from joestar.whole_numbers import plain


class GATConv(Conv):
    """Attention over in-neighbours and the node itself (Velickovic et al., 2018).

    ``x'_i = sum_j alpha_ij W x_j``, ``alpha_ij = softmax_j(leaky_relu(a_src W x_j + a_dst W x_i [+ a_e W_e e_ij]))``.
    Keys: ``att_src``, ``att_dst``, ``bias``, ``lin.weight`` (or ``lin_src.weight`` and ``lin_dst.weight`` for a pair
    of ``in_channels``), ``lin_edge.weight`` and ``att_edge`` with ``edge_dim``, ``res.weight`` with ``residual``.

    Args:
        in_channels: features of a row, or a pair for sources and destinations, which then have weights of their own.
        out_channels: features of one head.
        heads: number of heads.
        concat: concatenate the heads (``heads * out_channels`` features); otherwise their mean.
        negative_slope: of the leaky ReLU.
        dropout: probability of dropping an attention coefficient while training.
        add_self_loops: exactly one self-loop per destination.
        edge_dim: features of an edge; needs ``add_self_loops=False``, since added loops would have none.
        fill_value: accepted as PyG's default only, for the same reason.
        bias: learn an offset.
        residual: add a linear map of the destination's own row.
        **options: see ``Conv``.

    Raises:
        ConfigError: an unknown option, impossible values, ``edge_dim`` with ``add_self_loops``.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: str = "mean",
        bias: bool = True,
        residual: bool = False,
        **options: Any,
    ):
        in_channels, out_channels = checked_channels("GATConv", in_channels, out_channels)
        super().__init__(options.pop("aggr", "add"), **options)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = plain(heads)
        self.concat = concat
        self.negative_slope = negative_slope
        self.dropout = dropout
        self.add_self_loops = add_self_loops
        self.edge_dim = plain(edge_dim)
        self.fill_value = fill_value
        self.residual = residual
        self._check_options()
        self._make_parameters(bias)
        self.reset_parameters()

    def _check_options(self) -> None:
        if not isinstance(self.heads, int) or self.heads < 1:
            raise ConfigError(f"GATConv: heads must be a positive integer; got {self.heads!r}.")
        if not 0.0 <= self.dropout <= 1.0:
            raise ConfigError(f"GATConv: dropout must be a probability from 0 to 1; got {self.dropout!r}.")
        if self.reduces != ("sum",):
            raise ConfigError(f"GATConv: aggr must be 'sum' (or 'add'); got {self.aggr!r}.")
        if self.edge_dim is not None and self.add_self_loops:
            raise ConfigError(
                "GATConv: edge_dim needs add_self_loops=False, since self-loops that are added have no edge features. "
                "Put self-loops with features into the graph and construct GATConv with add_self_loops=False."
            )
        if not isinstance(self.fill_value, str) or self.fill_value != "mean":
            raise ConfigError(
                f"GATConv: fill_value is supported only as 'mean', PyG's default; got {self.fill_value!r}. It gives "
                "features to added self-loops, which cannot be combined with edge_dim here."
            )

    def _make_parameters(self, bias: bool) -> None:
        heads, width = self.heads, self.out_channels
        total = heads * width if self.concat else width
        if isinstance(self.in_channels, int):
            dst = self.in_channels
            self.lin = GlorotLinear(dst, heads * width, bias=False)
            self.lin_src = self.lin_dst = None
        else:
            src, dst = self.in_channels
            self.lin = None
            self.lin_src = GlorotLinear(src, heads * width, bias=False)
            self.lin_dst = GlorotLinear(dst, heads * width, bias=False)
        self.att_src = Parameter(torch.empty(1, heads, width))
        self.att_dst = Parameter(torch.empty(1, heads, width))
        if self.edge_dim is not None:
            self.lin_edge = GlorotLinear(self.edge_dim, heads * width, bias=False)
            self.att_edge = Parameter(torch.empty(1, heads, width))
        else:
            self.lin_edge = None
            self.register_parameter("att_edge", None)
        self.res = GlorotLinear(dst, total, bias=False) if self.residual else None
        if bias:
            self.bias = Parameter(torch.empty(total))
        else:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for linear in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if linear is not None:
                linear.reset_parameters()
        glorot(self.att_src)
        glorot(self.att_dst)
        glorot(self.att_edge)
        zeros(self.bias)

    def forward(
        self,
        block: Computation,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Computation, Tensor]]:
        """``[num_src, in]`` (or a pair, see ``Conv``) to ``[num_dst, heads * out]``, or ``[num_dst, out]`` for a mean.

        Args:
            block: a ``Block`` or ``Graph``.
            x: rows of the sources, or of sources and destinations.
            edge_attr: ``[num_edges, edge_dim]``, in the order of ``block.indices``.
            return_attention_weights: with any value but ``None``, the result is ``(out, (block, alpha))``: the block
                with the self-loops that were added, and the coefficients ``[its num_edges, heads]``.

        Raises:
            ConfigError: rows or features do not fit, or edge features without ``edge_dim``.
        """
        x_src, x_dst = self.rows(block, x)
        self._check_edges(edge_attr)
        h_src, h_dst = self._heads(block, x, x_src, x_dst)
        if self.add_self_loops:
            block = block.add_self_loops()
        alpha = self._attention(block, h_src, h_dst, edge_attr)
        out = self.aggregate(block, weighted(h_src, alpha))
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        if self.res is not None and x_dst is not None:
            out = out + self.res(x_dst)
        if self.bias is not None:
            out = out + self.bias
        return out if return_attention_weights is None else (out, (block, alpha))

    def _check_edges(self, edge_attr: Tensor | None) -> None:
        if edge_attr is not None and self.edge_dim is None:
            raise ConfigError(
                "GATConv: edge_attr came, but the layer was constructed without edge_dim. Construct it with "
                "edge_dim=<features of an edge> and add_self_loops=False."
            )

    def _heads(self, block: Computation, x, x_src: Tensor, x_dst: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Transformed rows of sources and destinations, ``[N, heads, out]``."""
        shape = (self.heads, self.out_channels)
        h_src = (self.lin_src if self.lin is None else self.lin)(x_src).unflatten(-1, shape)
        if x_dst is None:
            return h_src, None
        if self.lin is not None and isinstance(x, Tensor):  # destinations are rows of the sources
            return h_src, h_src[: block.num_dst]
        return h_src, (self.lin_dst if self.lin is None else self.lin)(x_dst).unflatten(-1, shape)

    def _attention(self, block: Computation, h_src: Tensor, h_dst: Tensor | None, edge_attr: Tensor | None) -> Tensor:
        """Attention coefficients ``[E, heads]``, dropout applied."""
        score_src = (h_src * self.att_src).sum(dim=-1)
        if h_dst is None:
            alpha = block.apply_edges(fn.copy_u(score_src))
        else:
            alpha = block.apply_edges(fn.u_add_v(score_src, (h_dst * self.att_dst).sum(dim=-1)))
        if edge_attr is not None:
            edge_attr = edge_attr.unsqueeze(-1) if edge_attr.dim() == 1 else edge_attr
            h_edge = self.lin_edge(edge_attr).unflatten(-1, (self.heads, self.out_channels))
            alpha = alpha + (h_edge * self.att_edge).sum(dim=-1)
        alpha = block.edge_softmax(F.leaky_relu(alpha, self.negative_slope))
        return F.dropout(alpha, p=self.dropout, training=self.training)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"
