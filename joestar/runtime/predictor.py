"""What a step predicts for nodes, sampled or exactly, and how well."""

from torch import Tensor

from joestar.errors import ChangedAfterCompileError
from joestar.locks import TRACING
from joestar.pyg import SubgraphSampler
from joestar.runtime.inference import Inference
from joestar.runtime.prediction import PREDICTED, agree_on, predict
from joestar.runtime.scoring import of_first, with_averages
from joestar.runtime.seeds import check_batch_size
from joestar.runtime.whole_graph import WholeGraph

_GIVEN = frozenset({
    "model", "sampler", "graph", "loss", "loss_fn", "optimizer", "seed", "clip_grad_norm", "clip_grad_value", "backend",
    "execution", "slack", "warm_up", "patience", "cuda_graph", "autocast", "accumulate", "loss_scale", "ema", "memory",
    "prefetch",
})  # fmt: skip
"""What ``joestar.compile`` was given: an attribute of that name would go unread."""


class Predictor:
    """The part of a ``Step`` that predicts; programs, weights, graph and random keys are the step's."""

    _inference: Inference | WholeGraph | None = None

    def __setattr__(self, name: str, value) -> None:
        """Refuses another model, loss or setting: programs are made of those that ``compile`` was given."""
        if name in _GIVEN and (name in vars(self) or name not in ("model", "sampler", "graph")):
            instead = "Call step.restart(seed)" if name == "seed" else "Call joestar.compile again"
            raise ChangedAfterCompileError(
                f"step.{name} cannot be assigned: what is trained is what joestar.compile was given. {instead}."
            )
        super().__setattr__(name, value)

    def predict(self, idx: Tensor, batch_size: int | None = None, full: bool = False):
        """Outputs in evaluation mode, ``[len(idx), C]`` or a structure of such, rows in the order of ``idx``, sampled
        like training batches. Several ranks divide the batches, and all get all rows.

        Args:
            batch_size: seeds per batch, by default 1,024. What is sampled depends on it, as batches are numbered.
            full: exact logits, from all neighbours, as ``joestar.inference`` gives them for a model with as many
                layers as the sampler makes blocks; ``batch_size`` are then the nodes of a range.
        """
        seeds = self._seeds(idx)
        batch = PREDICTED if batch_size is None else check_batch_size(batch_size)
        self._check("predict")
        if full:
            return self._exactly(seeds, batch_size)
        return predict(self._executor("predict"), seeds, batch, self._seed, self.group)

    def _exactly(self, seeds: Tensor, batch_size: int | None):
        """Every one of several ranks computes everything; they make sure that it is the same."""
        if self.group is None:
            return self._exact_inference(seeds).run(seeds, batch_size=batch_size)
        agree_on(self.group, self.model, seeds, batch_size or 0, self._seed, full=True)
        with self.group.board.at("step.predict or step.evaluate", long=True):
            return self._exact_inference(seeds).run(seeds, batch_size=batch_size)

    def _exact_inference(self, seeds: Tensor) -> Inference | WholeGraph:
        if self._inference is None and isinstance(self.sampler, SubgraphSampler):
            self._inference = WholeGraph(self.model, self.graph, self._options.autocast)
        if self._inference is None:
            with TRACING:  # as ``profile.sizes.measure``
                layers = len(self.sampler.sample(self.graph.keyed(self._seed), seeds[:1]))
            self._inference = Inference(self.model, self.graph, layers, self._options.autocast)
        if isinstance(self._inference, Inference):
            self._guard.check_reads(self._inference.reads)
        return self._inference

    def evaluate(
        self, idx: Tensor, batch_size: int | None = None, full: bool = False, *, metric=None, ema: bool = False
    ) -> dict[str, float]:
        """Scores of the predictions for ``idx`` against ``graph.ndata["y"]``: name -> number.

        By default accuracy of classes (one of C, or 0 and 1), ``f1_micro`` of several labels per node, and ``rmse``,
        ``mae``, ``r2`` of values; which of these is told by the loss, dtype and shape of the labels.

        Args:
            batch_size, full: as in ``predict``. ema: with averages of the weights (``compile(ema=...)``).
            metric: a name (``joestar.metrics.named()``, or ``"loss"``), an object with ``update``, ``compute`` and
                ``reset``, a function (output, target) -> float, a list of these, or a dict of them by name.

        Raises:
            LabelError: labels and outputs do not fit, or their meaning is not clear. ConfigError: for unusable metrics.
        """
        return self._scores(idx, batch_size, self.scorer.metrics(metric), ema, full)[0]

    def _scores(self, idx: Tensor, batch_size: int | None, metrics, ema: bool = False, full: bool = False) -> tuple:
        """What ``evaluate`` returns, for metrics of ``scorer.metrics``, and the metrics that were computed."""
        outputs = with_averages(self._update, ema, lambda: self.predict(idx, batch_size, full))
        scores, metrics = self.scorer(outputs, self._seeds(idx).long().to(self.whole.device), metrics)
        return of_first(self.group, scores), metrics
