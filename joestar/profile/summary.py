"""From a running executor to its record in the ledger."""

from joestar.profile.ledger import PassSummary, PlaceSummary, ProgramRecord, SetRecord, SiteRecord


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
        places=[PlaceSummary(p.pattern, p.node, p.fired, p.detail, p.source) for p in program.places],
        sites=[SiteRecord(s.key, list(s.options), s.default, s.taken, s.source) for s in program.sites],
        sets=_sets(executor.book.sizes, program.captured.labels, bounds),
        batch=program.batch,
        compiles=program.compiles,
        rewrites=dict(program.padded.rewrites) if program.padded is not None else {},
        seconds=dict(program.phases.seconds),
    )


def _sets(seen: dict[int, list], labels: list[str], bounds: dict[int, int]) -> list[SetRecord]:
    hop_of, hop = [], -1
    for label in labels:
        hop += label == "slice"
        hop_of.append(max(hop, 0))
    names = {"slice": "in-edges", "sample": "sampled edges", "compact": "source nodes"}
    records = []
    for index, (count, low, total, high) in sorted(seen.items()):
        name = f"hop {hop_of[index]} {names.get(labels[index], labels[index])}"
        mean, bound = total / count, bounds.get(index)
        waste = None if bound is None else max(0.0, 1 - mean / bound)
        records.append(SetRecord(name, int(count), int(low), mean, int(high), bound, waste))
    return records
