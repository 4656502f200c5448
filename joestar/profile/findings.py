"""What to do next: sentences made from the measurements by rules, the most promising first.

A rule looks at the report and says nothing, or one finding: a number, what it means, and the setting to change. They
are ranked by ``gain``, an estimate of the share of a step that the change may save; it is never shown, since only
measuring tells.
"""

from dataclasses import replace

from joestar.profile import numbers
from joestar.profile.advice import RULES, Finding, bounded
from joestar.profile.ledger import Report

SHOWN = 3


def findings(report: Report) -> list[Finding]:
    """The ``SHOWN`` most promising ones, one per knob; what is in order fills up the list if there are fewer."""
    ranked = sorted((found for rule in RULES if (found := rule(report)) is not None), key=lambda f: -f.gain)
    chosen: list[Finding] = []
    for finding in ranked:
        if finding.knob not in {other.knob for other in chosen}:
            chosen.append(finding)
    fine = [finding for finding in _fine(report) if finding.knob not in {other.knob for other in chosen}]
    return [*chosen, *fine][:SHOWN]


def _fine(report: Report) -> list[Finding]:
    """What is in order, for reports with little to say."""
    found, sets, counters = [], bounded(report), report.counters
    nothing = Finding("", "", "", "Nothing to change there.", "", 0.0)
    if report.profile is None and counters.steps:
        text, setting = "was measured of layers, kernels and stages in this run.", "joestar profile --html report.html"
        found.append(Finding("Nothing", text, setting, "measures them.", "measuring", 0.0))
    if counters.steps and not counters.fallbacks:
        found.append(
            replace(
                nothing, number="0", text=f"of {numbers.plural(counters.steps, 'batch', 'batches')} exceeded their "
                "bounds.", knob="bounds",
            )
        )  # fmt: skip
    if sets:
        waste = numbers.percent(sum(row.waste for row in sets) / len(sets))
        found.append(replace(nothing, number=waste, text="of the compiled sizes is padding.", knob="batch_size"))
    if counters.replay_rate is not None:
        rate = numbers.percent(counters.replay_rate)
        found.append(replace(nothing, number=rate, text="of the steps ran as one static program.", knob="execution"))
    return found


def caveat(report: Report) -> str:
    """Why the numbers should be taken with care, if they should."""
    profile = report.profile
    if profile is None or not profile.p20 or profile.p80 < 1.5 * profile.p20:
        return ""
    return (
        f"Steps took {numbers.digits(profile.p20)} to {numbers.milliseconds(profile.p80)}: something else was using "
        "this machine. Repeat it with more steps (--steps 100) before you trust a difference."
    )
