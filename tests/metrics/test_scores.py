"""Metrics against references that count pairs and thresholds one by one, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joestar.metrics import scores

NAN = math.nan


def auc_of_pairs(output, target) -> float:
    """Share of (positive, negative) pairs in the right order; ties count half."""
    ones = [x for x, y in zip(output, target, strict=True) if y == 1]
    zeros = [x for x, y in zip(output, target, strict=True) if y == 0]
    if not ones or not zeros:
        return NAN
    return sum((a > b) + 0.5 * (a == b) for a in ones for b in zeros) / (len(ones) * len(zeros))


def ap_of_thresholds(output, target) -> float:
    """Sum over thresholds of precision times gain of recall."""
    ones = sum(y == 1 for y in target)
    if not ones:
        return NAN
    total, recall = 0.0, 0.0
    for threshold in sorted({x for x, y in zip(output, target, strict=True) if y == y}, reverse=True):
        chosen = [y for x, y in zip(output, target, strict=True) if x >= threshold and y == y]
        precision, now = sum(chosen) / len(chosen), sum(chosen) / ones
        total, recall = total + precision * (now - recall), now
    return total


def f1_of_counts(predicted, target) -> float:
    pairs = [(p, y) for p, y in zip(predicted, target, strict=True) if y == y]
    both = sum(p and y == 1 for p, y in pairs)
    total = sum(bool(p) for p, _ in pairs) + sum(y == 1 for _, y in pairs)
    return 2 * both / total if total else 0.0


def mean_of(values) -> float:
    values = [value for value in values if value == value]
    return sum(values) / len(values) if values else NAN


def same(ours: float, theirs: float) -> None:
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-12, nan_ok=True)


OUTPUTS = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 3.0])  # few values: many ties
ROWS = st.lists(
    st.tuples(
        st.lists(OUTPUTS, min_size=3, max_size=3), st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=3, max_size=3)
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_yes_or_no(rows):
    """Single columns and three of them, with ties, unknown entries, one class only, no rows at all."""
    output = torch.tensor([x for x, _ in rows]).reshape(-1, 3)
    target = torch.tensor([y for _, y in rows]).reshape(-1, 3)
    columns = [(output[:, i].tolist(), target[:, i].tolist()) for i in range(3)]
    every = output.flatten().tolist(), target.flatten().tolist()
    same(scores.roc_auc(output, target), auc_of_pairs(*every))
    same(scores.ap(output, target), ap_of_thresholds(*every))
    same(scores.roc_auc_macro(output, target), mean_of([auc_of_pairs(*c) for c in columns]))
    same(scores.ap_macro(output, target), mean_of([ap_of_thresholds(*c) for c in columns]))
    if rows:
        same(scores.f1_micro(output, target), f1_of_counts([x > 0 for x in every[0]], every[1]))
        known = [c for c in columns if any(y == y for y in c[1])]
        same(scores.f1_macro(output, target), mean_of([f1_of_counts([x > 0 for x in xs], ys) for xs, ys in known]))
        right = [(x > 0) == (y == 1) for x, y in zip(*every, strict=True) if y == y]
        same(scores.hit_rate(output, target), sum(right) / len(right) if right else NAN)
    same(scores.roc_auc(output[:, 0], target[:, 0]), auc_of_pairs(*columns[0]))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.lists(OUTPUTS, min_size=4, max_size=4), st.integers(0, 3)), min_size=1, max_size=12))
def test_one_of_several_classes(rows):
    output, target = torch.tensor([x for x, _ in rows]), torch.tensor([y for _, y in rows])
    predicted = output.argmax(1).tolist()
    same(scores.accuracy(output, target), sum(p == y for p, (_, y) in zip(predicted, rows, strict=True)) / len(rows))
    seen = sorted({*predicted, *target.tolist()})
    per_class = [f1_of_counts([p == c for p in predicted], [float(y == c) for y in target.tolist()]) for c in seen]
    same(scores.macro_f1(output, target), mean_of(per_class))
    share = output.double().softmax(1)
    hits = [[float(y == c) for y in target.tolist()] for c in range(4)]
    same(scores.class_auc(output, target), mean_of([auc_of_pairs(share[:, c].tolist(), hits[c]) for c in range(4)]))
    same(scores.class_ap(output, target), mean_of([ap_of_thresholds(share[:, c].tolist(), hits[c]) for c in range(4)]))


def r2_of_column(output, target) -> float:
    pairs = [(x, y) for x, y in zip(output, target, strict=True) if y == y]
    if len(pairs) < 2:
        return NAN
    mean = math.fsum(y for _, y in pairs) / len(pairs)
    rest, total = math.fsum((x - y) ** 2 for x, y in pairs), math.fsum((y - mean) ** 2 for _, y in pairs)
    if len({y for _, y in pairs}) == 1:
        return float(rest == 0)
    return 1 - rest / total


VALUES = st.one_of(st.floats(-100, 100, width=32), st.just(NAN), st.just(1.5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), VALUES, VALUES), max_size=10))
def test_values(rows):
    output = torch.tensor([[x, -x] for x, *_ in rows], dtype=torch.float64).reshape(-1, 2)
    target = torch.tensor([y for _, *y in rows], dtype=torch.float64).reshape(-1, 2)
    errors = [x - y for x, y in zip(output.flatten().tolist(), target.flatten().tolist(), strict=True) if y == y]
    same(scores.mae(output, target), mean_of([abs(e) for e in errors]))
    same(scores.mse(output, target), mean_of([e * e for e in errors]))
    same(scores.rmse(output, target), math.sqrt(mean_of([e * e for e in errors])))
    columns = [(output[:, i].tolist(), target[:, i].tolist()) for i in range(2)]
    ours, theirs = scores.r2(output, target), mean_of([r2_of_column(*column) for column in columns])
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9, nan_ok=True)
    if rows:
        same(scores.mae(output[:, 0], target[:, 0]), scores.mae(output[:, :1], target[:, :1]))


def test_a_model_that_broke_down_has_no_score():
    output, target = torch.tensor([NAN, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    of_one = (
        scores.roc_auc, scores.ap, scores.roc_auc_macro, scores.ap_macro, scores.rmse, scores.r2, scores.hit_rate,
        scores.f1_micro, scores.f1_macro,
    )  # fmt: skip
    for metric in of_one:
        assert math.isnan(metric(output, target)), metric
        unknown = torch.tensor([NAN, 0.0, 1.0, 1.0])
        assert metric(torch.tensor([NAN, -1.0, 1.0, 2.0]), unknown) == metric(torch.tensor([0, -1.0, 1, 2]), unknown)
    several = torch.stack([torch.tensor([1.0, -1.0, 1.0]), output], 1)
    assert math.isnan(scores.f1_macro(several, torch.ones(3, 2))) and math.isnan(
        scores.f1_micro(several, torch.ones(3, 2))
    )
    for metric in (scores.accuracy, scores.macro_f1, scores.class_auc, scores.class_ap):
        assert math.isnan(metric(several, torch.tensor([0, 1, 1]))), metric
        assert metric(several[1:], torch.tensor([0, 1])) >= 0
