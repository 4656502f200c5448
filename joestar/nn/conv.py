"""What the convolutions share: the calling convention, its checks, and aggregation."""

from typing import Any

import torch
from torch import Tensor, nn

from joestar.errors import ConfigError
from joestar.graph_api.computation import Computation
from joestar.graph_api.fn import Message, u_mul_e
from joestar.nn.resolver import aggregations
from joestar.whole_numbers import plain

_FIXED = {"flow": ("source_to_target",), "node_dim": (-2, 0), "decomposed_layers": (1,), "aggr_kwargs": (None, {})}


class Conv(nn.Module):
    """A layer called as ``conv(block, x)``.

    ``block`` is a ``Block``, or a ``Graph`` whose nodes are sources and destinations. ``x`` is ``[num_src, F]``, of
    which the first ``num_dst`` rows are the destinations', or a pair ``([num_src, F_src], [num_dst, F_dst])``.

    Args:
        aggr: see ``joestar.nn.resolver.aggregations``; several are concatenated along the features.
        **options: PyG's ``flow``, ``node_dim``, ``decomposed_layers`` and ``aggr_kwargs``, at their defaults only.

    Raises:
        ConfigError: an unknown aggregation or option.
    """

    def __init__(self, aggr: str | list[str], **options: Any):
        super().__init__()
        name = type(self).__name__
        for option, value in options.items():
            if option not in _FIXED:
                raise ConfigError(f"{name}: unknown option {option!r} (value {value!r}). Remove it, or check its name.")
            if value not in _FIXED[option]:
                raise ConfigError(
                    f"{name}: {option} is supported only as {_FIXED[option][0]!r}, PyG's default; got {value!r}."
                )
        self.reduces = aggregations(aggr, name)
        self.aggr = aggr

    def aggregate(self, block: Computation, message: Message) -> Tensor:
        """``[num_dst, ..., D * len(aggr)]``: the in-edges' messages under every aggregation."""
        outs = [block.pull(message, reduce) for reduce in self.reduces]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    def rows(self, block: Computation, x: Tensor | tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """Source and destination rows of ``x``, checked against the block.

        Raises:
            ConfigError: ``block`` is not a ``Block`` or ``Graph``; rows or features do not fit.
        """
        name = type(self).__name__
        if not isinstance(block, Computation):
            raise ConfigError(
                f"{name}: expected conv(block, x) with a joestar Block or Graph first; got {type(block).__name__}. "
                "For an edge_index, make a graph of it: joestar.Graph.from_edge_index(edge_index)."
            )
        paired = isinstance(x, (tuple, list))
        x_src, x_dst = x if paired else (x, x)
        self._check(x_src, block.num_src, 0, "sources (block.num_src)")
        if not paired:
            x_dst = x_src[: block.num_dst]
        if x_dst is not None:
            self._check(x_dst, block.num_dst, 1, "destinations (block.num_dst)")
        return x_src, x_dst

    def _check(self, x: Tensor, rows, side: int, what: str) -> None:
        name = type(self).__name__
        if x.dim() != 2 or x.shape[0] != rows:
            raise ConfigError(
                f"{name}: expected features [{rows}, F], one row for each of the block's {what}; got "
                f"{list(x.shape)}. Rows of x are blocks[0].srcs for the first layer, and the result of the layer "
                "before for the others."
            )
        channels = getattr(self, "in_channels", None)
        channels = channels[side] if isinstance(channels, (tuple, list)) else channels
        if channels is not None and x.shape[1] != channels:
            raise ConfigError(
                f"{name}: expected {channels} features in every row (in_channels); got {x.shape[1]}. "
                "Construct the layer or model with the width of its input."
            )


def weighted(x: Tensor, weight: Tensor) -> Message:
    """``x[src] * weight`` in the dtype of ``x``: under autocast, weights come in float32 and rows in a shorter type."""
    return u_mul_e(x, weight if weight.dtype == x.dtype else weight.to(x.dtype))


def checked_channels(owner: str, in_channels: Any, out_channels: Any) -> tuple[Any, int]:
    """Both; raises ``ConfigError`` unless widths are positive integers (``in_channels`` may be a pair)."""
    in_channels, out_channels = plain(in_channels), plain(out_channels)
    widths = list(in_channels) if isinstance(in_channels, (tuple, list)) and len(in_channels) == 2 else [in_channels]
    if not all(isinstance(width, int) and width > 0 for width in [*widths, out_channels]):
        raise ConfigError(
            f"{owner}: in_channels must be a positive integer or a pair of them, and out_channels a positive integer; "
            f"got {in_channels!r} and {out_channels!r}. Sizes cannot be left open (-1): give the width of the input."
        )
    return in_channels, out_channels
