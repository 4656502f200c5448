"""Slacks of bounds worth trying: less padding against more overflows."""

import math
import statistics

from scipy.special import stdtr

from joestar.profile.sizes import SizeProfile, choose_bounds

SLACKS = (0.0, 0.01, 0.03, 0.1, 0.3)
RISK = 1e-3
"""Overflows per step that a slack other than the user's may be expected to have."""


def slack_options(profile: SizeProfile, batch: int, num_nodes: int, slack: float) -> dict[float, float]:
    """Slacks with different bounds -> expected overflows per step; the user's ``slack`` first.

    Smaller ones if they are safe, larger ones if the user's is not, up to the first that is.
    """
    largest = num_nodes + batch
    bounds = choose_bounds(profile, batch, num_nodes, slack)
    options, seen = {slack: overflow_risk(profile, bounds, largest)}, [bounds]
    risky = options[slack] > RISK
    for other in SLACKS:
        bounds = choose_bounds(profile, batch, num_nodes, other)
        risk = overflow_risk(profile, bounds, largest)
        if bounds in seen or risk > RISK or (other > slack and not risky):
            continue
        options[other] = risk
        seen.append(bounds)
        risky = risky and other < slack
    return options


def overflow_risk(profile: SizeProfile, bounds: list[int], largest: int) -> float:
    """Probability that the next batch exceeds a bound, at most (the sets are added up).

    Sizes are taken as normal; after n batches the next size is then distributed as Student's t with n - 1 degrees of
    freedom, ``sqrt(1 + 1 / n)`` standard deviations wide. A size that never varied is taken as constant.

    Args:
        largest: that a set of source nodes can become.
    """
    count, total = len(profile.batches), 0.0
    for label, column, bound in zip(profile.labels, zip(*profile.batches, strict=True), bounds, strict=True):
        spread = statistics.stdev(column) if count > 1 else 0.0
        if spread and not (label == "compact" and bound >= largest):
            distance = (bound - statistics.fmean(column)) / (spread * math.sqrt(1 + 1 / count))
            total += float(stdtr(count - 1, -distance))
    return min(total, 1.0)
