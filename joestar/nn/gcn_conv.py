"""The graph convolution of Kipf and Welling, on full graphs and on sampled blocks."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from joestar.errors import ConfigError
from joestar.graph_api import fn
from joestar.graph_api.block import Block
from joestar.graph_api.computation import Computation
from joestar.graph_api.graph import Graph
from joestar.nn.conv import Conv, checked_channels, weighted
from joestar.nn.init import GlorotLinear, zeros

NORMS = ("block", "graph")


class GCNConv(Conv):
    """``D^-1/2 (A + I) D^-1/2 X W + b`` (Kipf and Welling, 2017). Keys: ``lin.weight``, ``bias``.

    On a ``Graph`` both factors come from in-degrees, self-loop included: PyG's ``gcn_norm``. On a ``Block`` there are
    two readings, of equal cost:

    - ``norm="block"``: the block is all there is. A source is scaled by its out-degree within the block, a
      destination by its in-degree (DGL's ``norm="both"``).
    - ``norm="graph"``: the block is a sample. Both are scaled by their in-degree in the whole graph, and the sampled
      neighbours' sum by (degree in the graph / degree in the block): an unbiased estimate of the layer on the whole
      graph, given ``x``. Self-loops are never sampled, so they are not scaled up.

    Args:
        in_channels, out_channels: features of a row of ``x`` and of the result.
        improved: ``A + 2 I``. (PyG ignores this option without edge weights; here it always holds.)
        cached: refused: blocks change every step, and what does not change is hoisted out of the step.
        add_self_loops: exactly one self-loop per destination (default: as ``normalize``).
        normalize: scale by degrees; otherwise a plain sum.
        bias: learn an offset.
        norm: ``"block"`` or ``"graph"``.
        **options: see ``Conv``.

    Raises:
        ConfigError: an unknown norm, aggregation or option, or options that exclude each other.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        improved: bool = False,
        cached: bool = False,
        add_self_loops: bool | None = None,
        normalize: bool = True,
        bias: bool = True,
        *,
        norm: str = "block",
        **options: Any,
    ):
        in_channels, out_channels = checked_channels("GCNConv", in_channels, out_channels)
        super().__init__(options.pop("aggr", "add"), **options)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.improved = improved
        self.cached = cached
        self.add_self_loops = normalize if add_self_loops is None else add_self_loops
        self.normalize = normalize
        self.norm = norm
        self._check_options()
        self.lin = GlorotLinear(in_channels, out_channels, bias=False)
        if bias:
            self.bias = Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _check_options(self) -> None:
        if self.norm not in NORMS:
            raise ConfigError(f"GCNConv: norm must be one of {', '.join(NORMS)}; got {self.norm!r}.")
        if isinstance(self.in_channels, (tuple, list)):
            raise ConfigError("GCNConv: in_channels must be one integer: sources and destinations share the weights.")
        if self.reduces != ("sum",):
            raise ConfigError(f"GCNConv: aggr must be 'sum' (or 'add'); got {self.aggr!r}. SAGEConv takes others.")
        if self.cached:
            raise ConfigError(
                "GCNConv: cached=True is not supported, since every step has blocks of its own. Leave it out: "
                "joestar.compile moves what does not change between steps out of the step."
            )
        if self.add_self_loops and not self.normalize:
            raise ConfigError(
                "GCNConv: add_self_loops=True needs normalize=True. Without normalisation, call "
                "conv(block.add_self_loops(), x)."
            )

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.lin.reset_parameters()
        zeros(self.bias)

    def check_graph(self, graph: Graph) -> None:
        """Warns where the graph's own self-loops would make blocks differ from the layer on the graph."""
        if self.norm == "graph" and self.add_self_loops and graph.has_self_loops():
            warnings.warn(
                "GCNConv(norm='graph') adds a self-loop to every node, and this graph has some: on blocks they count "
                "as neighbours, so that results differ from the layer on the whole graph. Sample from "
                "graph.remove_self_loops().",
                stacklevel=2,
            )

    def forward(self, block: Computation, x: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        """``[num_src, in]`` to ``[num_dst, out]``.

        Args:
            block: a ``Block`` or ``Graph``.
            x: source rows.
            edge_weight: ``[num_edges]``, in the order of ``block.indices``.

        Raises:
            ConfigError: ``x`` does not fit; or edge weights with self-loops to add, or with normalisation on a
                ``Block``, whose degrees they do not determine.
        """
        if isinstance(x, (tuple, list)):
            raise ConfigError(
                "GCNConv: expected one tensor of source rows; got a pair. The destinations are the first rows of the "
                "sources; for two different sets of features use SAGEConv or GATConv."
            )
        x, _ = self.rows(block, x)
        if edge_weight is not None:
            self._check_weighted(block)
        z = self.lin(x)
        if self.normalize:
            out = self._propagate(block, z, edge_weight)
        else:
            out = self.aggregate(block, _message(z, edge_weight))
        return out if self.bias is None else out + self.bias

    def _check_weighted(self, block: Computation) -> None:
        if self.add_self_loops:
            raise ConfigError(
                "GCNConv: edge_weight cannot be combined with add_self_loops=True, since the loops to add have no "
                "weights. Put weighted self-loops into the graph, and construct GCNConv with add_self_loops=False."
            )
        if self.normalize and isinstance(block, Block):
            raise ConfigError(
                "GCNConv: edge_weight with normalize=True is defined on a Graph only. For sampled blocks, normalise "
                "the weights on the whole graph beforehand and construct GCNConv with normalize=False."
            )

    def _propagate(self, block: Computation, z: Tensor, edge_weight: Tensor | None) -> Tensor:
        """Source factor, sum over in-edges, destination factor: ``[num_src, out]`` to ``[num_dst, out]``."""
        sampled = isinstance(block, Block) and self.norm == "graph"
        loop_weight = (2 if self.improved else 1) if self.add_self_loops else 0
        looped = block.add_self_loops() if self.add_self_loops else block
        src_degrees, dst_degrees = self._degrees(looped, loop_weight, edge_weight)
        z = z * _inverse_sqrt(src_degrees, z.dtype)
        out = self.aggregate(looped, _message(z, edge_weight))
        if sampled:
            wide = torch.promote_types(z.dtype, torch.float32)  # of two integers, a float32
            ratio = _column(block.graph_degrees("dst").to(wide) / block.in_degrees().clamp(min=1), z.dtype)
            out = ratio * out
            if loop_weight:  # `out` has the loop once: take it out of the scaled sum, add it with its own weight
                out = out + (loop_weight - ratio) * z[: block.num_dst]
        elif loop_weight == 2:
            out = out + z[: block.num_dst]
        return out * _inverse_sqrt(dst_degrees, z.dtype)

    def _degrees(self, looped: Computation, loop_weight: int, edge_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Degrees behind the factors, ``[num_src]`` and ``[num_dst]``; every self-loop counts ``loop_weight``."""
        if not isinstance(looped, Block):
            weighted = None if edge_weight is None else looped.pull(fn.copy_e(edge_weight), "sum")
            degrees = looped.in_degrees() + max(loop_weight - 1, 0) if weighted is None else weighted
            return degrees, degrees
        if self.norm == "graph":
            return looped.graph_degrees("src") + loop_weight, looped.graph_degrees("dst") + loop_weight
        if loop_weight == 2:
            raise ConfigError(
                "GCNConv: improved=True on a sampled Block needs norm='graph': within a block only destinations have "
                "self-loops, so A + 2 I has no degrees to normalise by."
            )
        return looped.out_degrees(), looped.in_degrees()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels})"


def _message(z: Tensor, edge_weight: Tensor | None) -> fn.Message:
    return fn.copy_u(z) if edge_weight is None else weighted(z, edge_weight)


def _inverse_sqrt(degrees: Tensor, dtype: torch.dtype) -> Tensor:
    """``degrees ** -0.5`` as a column, 0 where the degree is 0 (without an infinite gradient there)."""
    degrees = degrees.to(torch.promote_types(dtype, torch.float32))
    empty = degrees == 0
    return _column(degrees.masked_fill(empty, 1.0).rsqrt().masked_fill(empty, 0.0), dtype)


def _column(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype).unsqueeze(-1)
