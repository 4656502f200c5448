"""From a running executor to its record in the ledger."""

from statistics import fmean

from joestar.profile.ledger import PassSummary, PlaceSummary, ProgramRecord, SetRecord, SiteRecord
from joestar.profile.sizes import SizeProfile


def program_record(executor) -> ProgramRecord:
    """The record of one executor's program: graphs, passes, sizes with bounds and padding, times."""
    program = executor.program
    bounds = dict(program.padded.checked) if program.padded is not None else {}
    return ProgramRecord(
        kind=program.kind,
        graph_before=program.before,
        graph_after=program.captured.gm.print_readable(print_output=False),
        passes=[
            PassSummary(p.name, p.rewrites, p.nodes_before, p.nodes_after, p.milliseconds, p.skipped)
            for p in program.passes
        ],
        places=[PlaceSummary(p.pattern, p.node, p.fired, p.detail, p.source, p.layer) for p in program.places],
        sites=[SiteRecord(s.key, list(s.options), s.default, s.taken, s.source) for s in program.sites],
        sets=_sets(executor.book.sizes, program.captured.labels, bounds, executor.observed),
        batch=program.batch,
        compiles=program.compiles,
        rewrites=dict(program.padded.rewrites) if program.padded is not None else {},
        seconds=dict(program.phases.seconds),
        slack=executor.slack,
    )


def _sets(
    seen: dict[int, list], labels: list[str], bounds: dict[int, int], observed: SizeProfile | None
) -> list[SetRecord]:
    """Sets that the program makes, as it has seen them; and those of the other hops, as the warm-up has."""
    names = {"slice": "in-edges", "sample": "sampled edges", "compact": "source nodes"}
    found, hop = [], -1
    for index, label in enumerate(labels):
        hop += label == "slice"
        name = f"hop {max(hop, 0)} {names.get(label, label)}"
        if index in seen:
            count, low, total, high = seen[index]
            mean, bound = total / count, bounds.get(index)
            waste = None if bound is None else max(0.0, 1 - mean / bound)
            found.append(SetRecord(name, int(count), int(low), mean, int(high), bound, waste))
        elif observed is not None and observed.labels == labels and label != "slice":
            sizes = [batch[index] for batch in observed.batches]
            found.append(SetRecord(name, len(sizes), min(sizes), fmean(sizes), max(sizes), None, None, stored=False))
    return found
