"""The file of ``joestar train --save``: parameters, and what it takes to build the model around them again."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joestar.cli import build
from joestar.cli.config import FIELDS, TrainConfig, checked
from joestar.cli.files import write_checkpoint
from joestar.data.attributes import plain_attributes
from joestar.errors import CheckpointError, ConfigError, DataError
from joestar.graph_api import Graph

FORMAT = 1
SETTINGS = frozenset(FIELDS) - {"report", "save", "checkpoints", "checkpoint_every", "keep", "resume"}
"""What is taken from a file: not where the run wrote to."""
AUTOCAST = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a model may be trained in beside float32, as files name it."""
MADE_BY = "expected a file that `joestar train --save FILE` wrote"


@dataclasses.dataclass
class Saved:
    """What such a file holds.

    Attributes:
        path: of the file.
        model: the state dict.
        config: settings of the training.
        features, classes: width of the features, classes (or tasks) of the graph that it was trained on.
        multilabel: whether several of the classes may hold for a node.
        results: what ``joestar train`` printed.
        regression: whether the outputs are values; class_names, feature_names: of the classes and features, if
            they have names.
        autocast: what it was trained in, under autocast; ``None``: float32.
        identity: of the graph that it was trained on (``joestar.data.identity``); empty if the file does not say.
    """

    path: Path
    model: dict[str, torch.Tensor]
    config: TrainConfig
    features: int
    classes: int
    multilabel: bool
    results: dict[str, Any]
    regression: bool = False
    class_names: list[str] | None = None
    autocast: torch.dtype | None = None
    feature_names: list[str] | None = None
    identity: dict[str, str] = dataclasses.field(default_factory=dict)

    def autocast_on(self, graph: Graph) -> torch.dtype | None:
        """What it runs in over a graph: the dtype of features of 16 bits, else what it was trained in."""
        return build.autocast_of(graph) or self.autocast

    def build(self, graph: Graph) -> nn.Module:
        """The model with its parameters, in evaluation mode, on the graph's device.

        Raises:
            DataError: the graph has no features, or others than those of the training.
            CheckpointError: the parameters are of another model.
        """
        self._check(graph)
        model = build.model_of(self.config, self.features, self.classes)
        try:
            model.load_state_dict(self.model)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise CheckpointError(
                f"{self.path}: its parameters do not fit its settings ({reason}); {MADE_BY}."
            ) from error
        return model.to(graph.device).eval()

    def _check(self, graph: Graph) -> None:
        x = graph.ndata.get("x")
        if x is None:
            raise DataError(f"the graph {graph.name!r} has no features ndata['x'], which the model reads.")
        if x.shape[1] != self.features:
            raise DataError(
                f"{self.path} was trained on {self.features} features per node (dataset {self.config.dataset}), the "
                f"graph {graph.name!r} has {x.shape[1]}: give a graph with the same features, in the same order."
            )
        there, here = self.feature_names, plain_attributes(graph)["feature_names"]
        if there is not None and here is not None and there != here:
            place = next(place for place, name in enumerate(there) if here[place] != name)
            raise DataError(
                f"{self.path} was trained on features called otherwise (dataset {self.config.dataset}): feature "
                f"{place} was {there[place]!r}, and is {here[place]!r} in the graph {graph.name!r}. Put the columns of "
                "the table of nodes into the order of the training, or call them alike."
            )


def write(
    path: str, model: nn.Module, config: TrainConfig, graph: Graph, results: dict[str, Any], identity: dict[str, str]
) -> None:  # fmt: skip
    """Writes parameters, settings and results; ``read`` reads them.

    Raises:
        ConfigError: the file cannot be written.
    """
    autocast, attributes = build.autocast_of(graph), plain_attributes(graph)
    content = {
        "joestar_model": FORMAT,
        "model": {name: value.detach().cpu() for name, value in model.state_dict().items()},
        "settings": dataclasses.asdict(config),
        "features": graph.ndata["x"].shape[1],
        "classes": build.outputs_of(graph),
        "multilabel": graph.multilabel,
        "regression": build.is_regression(graph),
        "class_names": attributes["class_names"],
        "feature_names": attributes["feature_names"],
        "autocast": None if autocast is None else build.named(autocast),
        "results": results,
        "graph": identity,
    }
    write_checkpoint(path, content)


def read(path: Path) -> Saved:
    """What ``write`` wrote; no code in the file is run.

    Raises:
        CheckpointError: the file is missing, damaged, or something else.
    """
    content = _loaded(path)
    if not isinstance(content, dict) or content.get("joestar_model") != FORMAT:
        raise CheckpointError(f"{path} {_what_else(content)}")
    try:
        given = {name: value for name, value in content["settings"].items() if value is not None and name in SETTINGS}
        config = TrainConfig(**{name: checked(name, _listed(value), name) for name, value in given.items()}).resolved()
        return Saved(
            path, content["model"], config, content["features"], content["classes"], content["multilabel"],
            content["results"], content["regression"], content["class_names"],
            AUTOCAST[content.get("autocast")], content.get("feature_names"), dict(content.get("graph") or {}),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{path} is incomplete or of another version of Joestar ({error}); {MADE_BY}.") from error


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _loaded(path: Path) -> Any:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: {MADE_BY}.")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder: {MADE_BY}.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds: no zip, cut short, another pickle
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise CheckpointError(
                f"{path} holds Python objects, such as a whole pickled model, which are not loaded, as that runs code; "
                f"{MADE_BY}."
            ) from error
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}): {MADE_BY}.") from error


def _what_else(content: Any) -> str:
    """What a readable file holds that is no saved model, and what can be done with it."""
    if isinstance(content, dict) and "joestar_model" in content:
        return f"has format {content['joestar_model']!r}; expected {FORMAT}: read it with the version that wrote it."
    if isinstance(content, dict) and "joestar_checkpoint" in content:
        return (
            "is a checkpoint of a run under way: go on with `joestar train --checkpoints FOLDER --resume --save FILE` "
            "and the settings of that run, then use FILE."
        )
    if isinstance(content, dict) and content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return (
            "holds bare parameters, without the settings of their model: in Python, build the model and call "
            f"model.load_state_dict(torch.load(path)); here, {MADE_BY}."
        )
    return f"is no saved model of Joestar's: {MADE_BY}."
