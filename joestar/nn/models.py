"""Models of several convolutions: PyG's ``BasicGNN`` over a list of blocks."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from joestar.errors import ConfigError
from joestar.graph_api.computation import Computation
from joestar.nn.conv import Conv
from joestar.nn.gat_conv import GATConv
from joestar.nn.gcn_conv import GCNConv
from joestar.nn.gin_conv import GINConv
from joestar.nn.historical import historical
from joestar.nn.jumping_knowledge import MODES, JumpingKnowledge
from joestar.nn.mlp import MLP
from joestar.nn.resolver import activation, normalization
from joestar.nn.sage_conv import SAGEConv
from joestar.whole_numbers import plain


class BasicGNN(nn.Module):
    """Convolutions with activation, normalisation and dropout between them, called as ``model(blocks, x)``.

    Keys as in PyG: ``convs.*``, ``norms.*``, ``act.*``, ``jk.*``, ``lin.*``.

    Args:
        in_channels: features of a row of ``x`` (a pair where the convolution takes one).
        hidden_channels: features of a hidden row.
        num_layers: number of convolutions, one for each block.
        out_channels: features of a result row; ``None``: ``hidden_channels``.
        dropout: probability after every hidden layer.
        act, act_first, act_kwargs: the activation, and whether it comes before the normalisation.
        norm, norm_kwargs: see ``joestar.nn.resolver.normalization``.
        jk: ``None``, or ``"last"``, ``"cat"``, ``"max"``, ``"lstm"``: jumping knowledge and a linear layer at the end.
        **kwargs: further arguments of the convolution.

    Raises:
        ConfigError: an unknown name or impossible value.
    """

    supports_edge_weight = False
    supports_edge_attr = False
    _is_conv_to_out = False

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        hidden_channels: int,
        num_layers: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        act: str | Callable | None = "relu",
        act_first: bool = False,
        act_kwargs: dict[str, Any] | None = None,
        norm: str | nn.Module | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        jk: str | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        in_channels, hidden_channels, num_layers, out_channels = plain(
            [in_channels, hidden_channels, num_layers, out_channels]
        )
        if not isinstance(num_layers, int) or num_layers < 1:
            raise ConfigError(f"{type(self).__name__}: num_layers must be a positive integer; got {num_layers!r}.")
        if jk is not None and jk not in ("last", *MODES):
            known = ", ".join(("last", *MODES))
            raise ConfigError(f"{type(self).__name__}: jk must be one of {known}, or None; got {jk!r}.")
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.num_layers = num_layers
        self.out_channels = hidden_channels if out_channels is None else out_channels
        self.dropout = nn.Dropout(p=dropout)
        self.act = activation(act, act_kwargs)
        self.act_first = act_first
        self.jk_mode = jk
        self.norm = norm if isinstance(norm, str) else None
        self.norm_kwargs = norm_kwargs
        self._make_convs(out_channels, kwargs)
        self._make_norms(normalization(norm, hidden_channels, norm_kwargs) or nn.Identity())
        if jk in MODES:
            self.jk = JumpingKnowledge(jk, hidden_channels, num_layers)
        if jk is not None:
            self.lin = nn.Linear(num_layers * hidden_channels if jk == "cat" else hidden_channels, self.out_channels)

    def _make_convs(self, out_channels: int | None, kwargs: dict[str, Any]) -> None:
        hidden, width = self.hidden_channels, self.in_channels
        self.convs = nn.ModuleList()
        for _ in range(self.num_layers - 1):
            self.convs.append(self.init_conv(width, hidden, **kwargs))
            width = (hidden, hidden) if isinstance(width, (tuple, list)) else hidden
        self._is_conv_to_out = out_channels is not None and self.jk_mode is None
        self.convs.append(self.init_conv(width, out_channels if self._is_conv_to_out else hidden, **kwargs))

    def _make_norms(self, norm: nn.Module) -> None:
        self.norms = nn.ModuleList([copy.deepcopy(norm) for _ in range(self.num_layers - 1)])
        self.norms.append(nn.Identity() if self.jk_mode is None else copy.deepcopy(norm))

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> Conv:
        """The convolution of one layer."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for module in [*self.convs, *self.norms, getattr(self, "jk", None), getattr(self, "lin", None)]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(
        self,
        blocks: list[Computation] | Computation,
        x: Tensor,
        edge_weight: Tensor | list[Tensor] | None = None,
        edge_attr: Tensor | list[Tensor] | None = None,
    ) -> Tensor:
        """``[blocks[0].num_src, in_channels]`` to ``[blocks[-1].num_dst, out_channels]``.

        Args:
            blocks: one block for every layer, input side first; or a graph, used at every layer.
            x: features of the first block's sources.
            edge_weight: ``[E]`` for the one graph, or one for every block (where the convolution takes it: GCN).
            edge_attr: ``[E, D]``, likewise (GAT).

        Raises:
            ConfigError: the number of blocks, rows or features does not fit; edge values that the convolution lacks.
        """
        blocks = self._blocks(blocks)
        options = self._edge_options(edge_weight, edge_attr)
        num_seeds = blocks[-1].num_dst
        xs = []
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = conv(blocks[i], x, **options[i])
            if i < self.num_layers - 1:
                x = historical(x, blocks[i])
            if i < self.num_layers - 1 or self.jk_mode is not None:
                x = self._between(norm, x)
                xs.append(x[:num_seeds])
        if self.jk_mode in MODES:
            x = self.jk(xs)
        return x if self.jk_mode is None else self.lin(x)

    def _between(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.act is not None and self.act_first:
            x = self.act(x)
        x = norm(x)
        if self.act is not None and not self.act_first:
            x = self.act(x)
        return self.dropout(x)

    def _blocks(self, blocks: list[Computation] | Computation) -> list[Computation]:
        if isinstance(blocks, Computation):
            return [blocks] * self.num_layers
        name = type(self).__name__
        if not isinstance(blocks, (list, tuple)):
            raise ConfigError(
                f"{name}: expected model(blocks, x) with a list of joestar Blocks (or one Graph) first; got "
                f"{type(blocks).__name__}."
            )
        if len(blocks) != self.num_layers:
            raise ConfigError(
                f"{name}: expected {self.num_layers} blocks, one for each layer; got {len(blocks)}. Let the sampler "
                f"make as many hops as the model has layers (such as {self.num_layers} fanouts), or change num_layers."
            )
        return list(blocks)

    def _edge_options(self, edge_weight, edge_attr) -> list[dict[str, Tensor]]:
        """Arguments of every layer's convolution besides block and rows."""
        options: list[dict[str, Tensor]] = [{} for _ in range(self.num_layers)]
        given = (
            ("edge_weight", edge_weight, self.supports_edge_weight),
            ("edge_attr", edge_attr, self.supports_edge_attr),
        )
        for option, values, supported in given:
            if values is None:
                continue
            if not supported:
                raise ConfigError(f"{type(self).__name__}: its convolution has no {option}. Leave it out.")
            values = [values] * self.num_layers if isinstance(values, Tensor) else values
            if len(values) != self.num_layers:
                raise ConfigError(
                    f"{type(self).__name__}: {option} needs one tensor for each of {self.num_layers} layers, or one "
                    f"for all of them on a Graph; got {len(values)}."
                )
            for layer, value in zip(options, values, strict=True):
                layer[option] = value
        return options

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, num_layers={self.num_layers})"


class GraphSAGE(BasicGNN):
    """Layers of ``SAGEConv`` (Hamilton, Ying and Leskovec, 2017). Arguments: ``BasicGNN`` and ``SAGEConv``."""

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> SAGEConv:
        """The convolution of one layer."""
        return SAGEConv(in_channels, out_channels, **kwargs)


class GCN(BasicGNN):
    """Layers of ``GCNConv`` (Kipf and Welling, 2017). Arguments: ``BasicGNN`` and ``GCNConv``.

    ``norm`` is the model's normalisation layer, as in PyG; ``GCNConv``'s ``norm`` is called ``gcn_norm`` here.
    """

    supports_edge_weight = True

    def init_conv(self, in_channels: int, out_channels: int, gcn_norm: str = "block", **kwargs: Any) -> GCNConv:
        """The convolution of one layer."""
        return GCNConv(in_channels, out_channels, norm=gcn_norm, **kwargs)


class GIN(BasicGNN):
    """Layers of ``GINConv`` over a two-layer ``MLP`` (Xu et al., 2019). Arguments: ``BasicGNN`` and ``GINConv``."""

    def init_conv(self, in_channels: int, out_channels: int, **kwargs: Any) -> GINConv:
        """The convolution of one layer."""
        mlp = MLP(
            [in_channels, out_channels, out_channels],
            act=self.act,
            act_first=self.act_first,
            norm=self.norm,
            norm_kwargs=self.norm_kwargs,
        )
        return GINConv(mlp, **kwargs)


class GAT(BasicGNN):
    """Layers of ``GATConv`` (Velickovic et al., 2018). Arguments: ``BasicGNN`` and ``GATConv``.

    Widths count all heads: a layer of ``hidden_channels`` has ``hidden_channels / heads`` features per head. The last
    layer averages its heads instead, unless ``jk`` or ``out_channels=None`` puts no width of its own on it. ``dropout``
    also drops attention coefficients.
    """

    supports_edge_attr = True

    def init_conv(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, concat: bool = True, **kwargs: Any
    ) -> GATConv:
        """The convolution of one layer."""
        if kwargs.pop("v2", False):
            raise ConfigError("GAT: v2=True (GATv2Conv) is not supported. Leave it out for GATConv.")
        concat = concat and not self._is_conv_to_out
        if concat and out_channels % heads != 0:
            raise ConfigError(
                f"GAT: a layer's width must be divisible by heads; got {out_channels} and heads={heads}. Change "
                "hidden_channels, out_channels or heads."
            )
        width = out_channels // heads if concat else out_channels
        return GATConv(in_channels, width, heads=heads, concat=concat, dropout=self.dropout.p, **kwargs)
