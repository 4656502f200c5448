"""The end of ``joestar train``: what was planned under a budget, beside what came."""

from types import SimpleNamespace

from joestar.cli.summary import short_report
from joestar.profile.ledger import Counters, Expected, FeedingRecord


def test_planned_beside_measured():
    fed = FeedingRecord("", [], {}, {}, [Expected("an epoch, s", 1.25, 12.34)])
    report = SimpleNamespace(counters=Counters(), programs=[], feeding=fed)
    assert "an epoch, s: planned 1.25, measured 12.3" in short_report(report)
    report.feeding = None
    assert len(short_report(report)) == 1
