"""The flags of ``joestar train`` and ``joestar profile``, made from the fields of ``TrainConfig``."""

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from joestar.cli.config import FIELDS, TrainConfig, build_config

CONFIG_HELP = "TOML file with any of these settings (batch_size = 500); flags override it."


def takes_settings(command: Callable[..., None], only: Collection[str] = FIELDS) -> Callable[..., None]:
    """Turns ``command(config, ...)`` into a Typer command with a flag per setting, and ``--config``.

    Every flag of a setting defaults to ``None``, which tells a flag that was given from one that was not. Further
    parameters of the command stay as they are.

    Args:
        only: names of the settings that get a flag; the others keep their default, or what the file says.
    """
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def with_flags(**flags: Any) -> None:
        file, extra = flags.pop("config"), {parameter.name: flags.pop(parameter.name) for parameter in own}
        config = build_config(file, flags)
        if file is not None:
            _check_outputs(file, config, extra)
        command(config, **extra)

    parameters = [_parameter(name) for name in FIELDS if name in only]
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    config = Annotated[
        Path | None, typer.Option("--config", help=CONFIG_HELP, metavar="FILE", rich_help_panel="Output")
    ]
    parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config))
    with_flags.__signature__ = inspect.Signature(parameters)
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del with_flags.__wrapped__
    return with_flags


def _check_outputs(file: Path, config: TrainConfig, extra: dict[str, Any]) -> None:
    """Raises ``ConfigError`` if the settings would be replaced by what comes of them."""
    from joestar.cli.files import check_outputs

    written = {f"--{name}": getattr(config, name) for name in ("report", "save")}
    written |= {flag: extra.get(name) for flag, name in (("--html", "html"), ("--json", "json_file"))}
    check_outputs(written, {"--config": file})


def _parameter(name: str) -> inspect.Parameter:
    spec = FIELDS[name]
    rules = spec.metadata
    kind = next((base for base in (bool, int, float) if spec.type in (base, base | None)), str)
    if name == "dataset":
        info = typer.Argument(help=rules["help"], show_default=_shown(spec), metavar="DATASET")
    else:
        flag = f"--{name.replace('_', '-')}"
        info = typer.Option(
            f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
            help=rules["help"],
            show_default=_shown(spec),
            metavar=_metavar(kind, rules),
            rich_help_panel=rules["group"],
        )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _shown(spec: Any) -> str | bool:
    """The default as the help text shows it; False where there is none."""
    if "shown" in spec.metadata:
        return spec.metadata["shown"]
    if spec.default is None:
        return False
    return {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else str(spec.default)


def _metavar(kind: type, rules: Any) -> str | None:
    if "choices" in rules:
        return "|".join(rules["choices"])
    return rules.get("metavar") or {int: "N", float: "X", str: "TEXT"}.get(kind)
