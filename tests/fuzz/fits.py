"""Random fits: schedules, scores, early ends, the best parameters - and Ctrl-C or the end of the process at any line,
and going on from the checkpoints - beside the loop by hand.

``PYTHONPATH=tests python -m fuzz.fits N`` runs fit N and prints what it is.
"""

import math
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import lr_scheduler

import joestar
from joestar.runtime.fit_records import LOSS

from . import scripts
from .broken import Killed, broken_at, counted, drawn
from .script_plain import Plain
from .script_worlds import Ours

NODES, BREAKS = 500, 6
MODES = {"accuracy": "max"}
SCHEDULES = {
    "exponential": lambda o, fit: lr_scheduler.ExponentialLR(o, 0.8),
    "steps": lambda o, fit: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o, fit: lr_scheduler.CosineAnnealingLR(o, fit.planned),
    "warm": lambda o, fit: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 4)),
    "one cycle": lambda o, fit: lr_scheduler.OneCycleLR(
        o, 0.03, total_steps=fit.planned, cycle_momentum=bool({"betas", "momentum"} & set(fit.settings))
    ),
    "plateau": lambda o, fit: lr_scheduler.ReduceLROnPlateau(o, MODES.get(fit.watched, "min"), 0.5, patience=0),
    "chained": lambda o, fit: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "none": lambda o, fit: None,
}


class Drawn(scripts.Drawn):
    """What a fit is called with.

    Attributes:
        watched: decides which epoch is the best; planned: steps of the schedule.
    """

    def __init__(self, number: int, backend: str):
        super().__init__(number, backend)
        rng = random.Random(f"fit {number}")
        if self.settings.get("momentum") == 0.9 and rng.random() < 0.5:
            self.settings |= {"momentum": 0.5}
        self.epochs, self.batch = rng.randint(1, 4), rng.choice((30, 50, 64, 300))
        self.train = torch.tensor(rng.sample(range(NODES), rng.randint(40, 220)))
        self.val = torch.tensor(rng.sample(range(NODES), rng.randint(10, 90))) if rng.random() < 0.8 else None
        self.drop_last, self.scored = rng.random() < 0.3, list(self.task.scored)
        self.monitor = rng.choice((None, LOSS, *(self.scored if self.val is not None else ())))
        self.watched = self.monitor or (LOSS if self.val is None else self.scored[0])
        self.wait = rng.choice((None, 1, 2)) if self.val is not None or self.monitor == LOSS else None
        self.of_average = self.ema is not None and rng.random() < 0.5
        self.schedules = rng.choice(list(SCHEDULES))
        self.due = "epoch" if self.schedules == "plateau" else rng.choice(("epoch", "step"))
        self.planned = self.epochs * (self.updates if self.due == "step" else 1)
        self.every, self.keep = rng.choice((None, 1, 2, 3)), rng.choice((1, 3))
        self.within = rng.choice((None, "evaluate", "predict"))

    @property
    def steps(self) -> int:
        """Of an epoch."""
        n = len(self.train)
        return n // min(self.batch, n) if self.drop_last else -(-n // self.batch)

    @property
    def updates(self) -> int:
        """Steps of the optimizer in an epoch."""
        return -(-self.steps // self.accumulate)

    def schedule(self, optimizer: torch.optim.Optimizer):
        return SCHEDULES[self.schedules](optimizer, self)

    def improves(self, value: float, than: float) -> bool:
        """Whether an epoch is better than the best before."""
        return value > than if MODES.get(self.watched) == "max" else value < than


class Fitted(Ours):
    """By ``Step.fit``."""

    def fit(self, folder: Path, resume: bool) -> dict:
        """Trains; what is known behind it."""
        d = self.drawn
        watch = {} if d.val is None else {"metric": d.scored}
        history = self.step.fit(
            d.train.to(self.home), None if d.val is None else d.val.to(self.home), d.epochs, d.batch,
            patience=d.wait, scheduler=self.schedule, schedule=None if self.schedule is None else d.due,
            monitor=d.monitor, drop_last=d.drop_last, ema=d.of_average, on_epoch=self.beside,
            checkpoints=joestar.Checkpoints(folder, keep=d.keep), checkpoint_every=d.every, resume=resume, **watch,
        )  # fmt: skip
        records = [asdict(record) for record in history.records]
        return {
            "losses": [r["loss"] for r in records], "scores": [r["scores"] for r in records],
            "logs": [r["logged"] for r in records], "rates": [r["lr"] for r in records],
            "best": history.best_epoch, "early": history.stopped_early,
        }  # fmt: skip

    def beside(self, record) -> None:
        """What people do at the end of an epoch."""
        if self.drawn.within == "evaluate":
            self.evaluate(torch.arange(100), 50, False)
        elif self.drawn.within == "predict":
            self.predict(torch.arange(70), 30, False)


class ByHand(Plain):
    """The loop of one's own."""

    def fit(self) -> dict:
        d, found = self.drawn, {name: [] for name in ("losses", "scores", "logs", "rates")}
        best, best_value, weights, of_loss = 0, math.nan, None, {}
        early = False
        for epoch in range(d.epochs):
            self.open(d.train, d.batch, True, d.drop_last)
            losses, logs = [], []
            while self.left()[0]:
                losses.append(self.next(0))
                logs.append(self.logs)
                complete = not self.epochs[0].sums
                if self.schedule is not None and d.due == "step" and complete:
                    self.schedule.step()
            self.leave(0)
            loss = float(torch.stack(losses).mean())
            values = [] if d.val is None else self.evaluate(d.val, d.batch, d.of_average).tolist()
            scores = dict(zip(d.scored, values, strict=False))
            found["losses"].append(loss)
            found["scores"].append(scores)
            found["logs"].append({name: float(torch.stack([log[name] for log in logs]).mean()) for name in logs[0]})
            found["rates"].append(float(self.optimizer.param_groups[0]["lr"]))
            value = scores.get(d.watched, loss)
            if d.val is not None or d.monitor == LOSS:
                if epoch == 0 or d.improves(value, best_value):
                    best, best_value, weights, of_loss = epoch, value, self.weights(), self.of_loss()
            else:
                best = epoch
            early = d.wait is not None and epoch - best >= d.wait
            if self.schedule is not None and d.due == "epoch":
                self.schedule.step(*([value] if d.schedules == "plateau" else []))
            if early:
                break
        if weights is not None:
            self.model.load_state_dict(weights)
        if of_loss:
            self.loss.load_state_dict(of_loss)
        return found | {"best": best, "early": early}

    def of_loss(self) -> dict:
        state = self.loss.state_dict() if isinstance(self.loss, torch.nn.Module) else {}
        return {name: value.clone() for name, value in state.items()}

    def weights(self) -> dict:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        averages = self.averages() if self.drawn.of_average else {}
        return found | {name: value.detach().clone() for name, value in averages.items()}


class Fit:
    """One fit, undisturbed and broken off up to six times.

    Attributes:
        said: where it was broken off.
    """

    def __init__(self, number: int, backend: str = "eager"):
        self.drawn, self.rng = Drawn(number, backend), random.Random(f"breaks of fit {number}")
        self.said: list[str] = []

    def run(self) -> None:
        """Compares all three.

        Raises:
            AssertionError: where they differ, with what they are.
        """
        try:
            self._run()
        except BaseException as error:
            error.add_note(f"fit {self.drawn.number}: {vars(self.drawn)}\n" + "\n".join(self.said))
            raise

    def _run(self) -> None:
        plain = ByHand(self.drawn)
        expected = plain.fit()
        with tempfile.TemporaryDirectory() as folder:
            whole = Fitted(self.drawn)
            with counted() as counts:
                found = whole.fit(Path(folder), resume=False)
            self._compare("undisturbed", whole, found, plain, expected)
        with tempfile.TemporaryDirectory() as folder:
            world, found = self._broken(Path(folder), counts)
            self._compare("broken off", world, found, plain, expected)
            again = Fitted(self.drawn, initial=5)
            found = again.fit(Path(folder), resume=True)
            self._compare("once more", again, found, plain, expected)

    def _broken(self, folder: Path, counts) -> tuple[Fitted, dict]:
        world = Fitted(self.drawn)
        for _ in range(self.rng.randint(2, BREAKS)):
            place, kill = drawn(counts, self.rng), self.rng.random() < 0.4
            new = kill or self.rng.random() < 0.5
            self.said.append(f"{'killed' if kill else 'Ctrl-C'}, {'new process' if new else 'same'}: {place}")
            try:
                with broken_at(place, kill) as came:
                    found = world.fit(folder, resume=True)
            except (KeyboardInterrupt, Killed):
                assert came[0]
            if new or not any(folder.iterdir()):
                world = Fitted(self.drawn, initial=5 if any(folder.glob("checkpoint-*.pt")) else 0)
        found = world.fit(folder, resume=True)
        return world, found

    def _compare(self, name: str, ours: Fitted, found: dict, plain: ByHand, expected: dict) -> None:
        self.said.append(name)
        assert [found["best"], found["early"]] == [expected["best"], expected["early"]]
        for kind in ("losses", "rates"):
            assert torch.allclose(torch.tensor(found[kind]), torch.tensor(expected[kind]), rtol=1e-7, atol=1e-9), kind
        for kind in ("scores", "logs"):
            for mine, other in zip(found[kind], expected[kind], strict=True):
                assert mine.keys() == other.keys(), kind
                values = [torch.tensor([side[key] for key in other], dtype=torch.float64) for side in (mine, other)]
                torch.testing.assert_close(*values, **scripts.WITHIN)
        scripts.compare(*(self._lasting(side.state()) for side in (ours, plain)))

    @staticmethod
    def _lasting(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in state.items() if name != "seeds" and not name.startswith("logged")}


if __name__ == "__main__":
    fit = Fit(int(sys.argv[1]))
    try:
        fit.run()
    finally:
        print(vars(fit.drawn), *fit.said, sep="\n")
