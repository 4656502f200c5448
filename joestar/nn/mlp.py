"""A multi-layer perceptron with PyG's arguments and keys."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from joestar.errors import ConfigError
from joestar.nn.resolver import activation, normalization
from joestar.whole_numbers import plain


class MLP(nn.Module):
    """Linear layers with activation, normalisation and dropout between them. Keys: ``lins.*``, ``norms.*``, ``act.*``.

    Args:
        channel_list: widths from input to output; or else the four following.
        in_channels, hidden_channels, out_channels, num_layers: widths of ``num_layers`` equal hidden layers.
        dropout: probability after each hidden layer, or one for every layer.
        act, act_first, act_kwargs: the activation, and whether it comes before the normalisation.
        norm, norm_kwargs: see ``joestar.nn.resolver.normalization``.
        plain_last: no activation, normalisation and dropout after the last layer.
        bias: learn offsets, for all layers or one flag for every layer.

    Raises:
        ConfigError: widths, dropout values or flags that do not fit together; an unknown name.
    """

    def __init__(
        self,
        channel_list: list[int] | int | None = None,
        *,
        in_channels: int | None = None,
        hidden_channels: int | None = None,
        out_channels: int | None = None,
        num_layers: int | None = None,
        dropout: float | list[float] = 0.0,
        act: str | Callable | None = "relu",
        act_first: bool = False,
        act_kwargs: dict[str, Any] | None = None,
        norm: str | nn.Module | None = "batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        plain_last: bool = True,
        bias: bool | list[bool] = True,
    ):
        super().__init__()
        channel_list, in_channels, num_layers = plain([channel_list, in_channels, num_layers])
        hidden_channels, out_channels = plain([hidden_channels, out_channels])
        if isinstance(channel_list, int):
            in_channels = channel_list
        if in_channels is not None:
            channel_list = _equal_widths(in_channels, hidden_channels, out_channels, num_layers)
        if not isinstance(channel_list, (list, tuple)) or len(channel_list) < 2:
            raise ConfigError(f"MLP: channel_list must list two or more widths; got {channel_list!r}.")
        self.channel_list = list(channel_list)
        self.act = activation(act, act_kwargs)
        self.act_first = act_first
        self.plain_last = plain_last
        self.dropout = self._for_each_layer("dropout", dropout, plain_last_value=0.0)
        biases = self._for_each_layer("bias", bias, plain_last_value=None)
        widths = zip(self.channel_list, self.channel_list[1:], biases, strict=False)
        self.lins = nn.ModuleList([nn.Linear(src, dst, bias=flag) for src, dst, flag in widths])
        self.norms = nn.ModuleList()
        for width in self.channel_list[1:-1] if plain_last else self.channel_list[1:]:
            self.norms.append(normalization(norm, width, norm_kwargs) or nn.Identity())
        self.reset_parameters()

    def _for_each_layer(self, name: str, value: Any, plain_last_value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            values = [value] * self.num_layers
            if self.plain_last and plain_last_value is not None:
                values[-1] = plain_last_value
            return values
        if len(value) != self.num_layers:
            raise ConfigError(f"MLP: {name} needs one value for each of {self.num_layers} layers; got {len(value)}.")
        return list(value)

    @property
    def in_channels(self) -> int:
        """Width of the input."""
        return self.channel_list[0]

    @property
    def out_channels(self) -> int:
        """Width of the output."""
        return self.channel_list[-1]

    @property
    def num_layers(self) -> int:
        """Number of linear layers."""
        return len(self.channel_list) - 1

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        for module in [*self.lins, *self.norms]:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """``[N, in_channels]`` to ``[N, out_channels]``."""
        for i, (lin, norm) in enumerate(zip(self.lins, self.norms, strict=False)):  # `plain_last`: one norm fewer
            x = lin(x)
            if self.act is not None and self.act_first:
                x = self.act(x)
            x = norm(x)
            if self.act is not None and not self.act_first:
                x = self.act(x)
            x = F.dropout(x, p=self.dropout[i], training=self.training)
        if self.plain_last:
            x = F.dropout(self.lins[-1](x), p=self.dropout[-1], training=self.training)
        return x

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.channel_list)[1:-1]})"


def _equal_widths(in_channels, hidden_channels, out_channels, num_layers) -> list[int]:
    if num_layers is None or out_channels is None or (num_layers > 1 and hidden_channels is None):
        raise ConfigError(
            "MLP: with in_channels, give num_layers and out_channels too, and hidden_channels for two or more layers; "
            f"got num_layers={num_layers}, hidden_channels={hidden_channels}, out_channels={out_channels}."
        )
    return [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
