"""The curves of ``docs/benchmarks.md``: how much shorter an epoch is on more GPUs, and what of a step is their sum.

    joestar bench epoch --gpus 1,2,4 --shape papers --precision tf32 --models sage --json sage.json
    python benchmarks/plot_scaling.py sage.json gat.json --out docs/scaling.svg
    python benchmarks/plot_scaling.py benchmarks/scaling_h200.json --out docs/scaling.svg     # as they are there

Needs matplotlib: ``pip install joestar[plots]``.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path


def curves(rows: list[dict]) -> dict[str, list[tuple[int, float, float]]]:
    """Model -> (GPUs, speed-up of an epoch, share of a step that the sum takes), by GPUs.

    Speed-ups are over one GPU; without a row of one, the fewest are taken to scale ideally. Epochs count by their
    median, the first, which compiles, left out; rows that failed are left out.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["world"]):
        if not row.get("note"):
            seconds = statistics.median(row["seconds"][1:] or row["seconds"])
            found.setdefault(row["model"], []).append((row["world"], seconds, row["share"]))
    return {
        model: [(world, points[0][0] * points[0][1] / seconds, share) for world, seconds, share in points]
        for model, points in found.items()
    }


def draw(found: dict[str, list[tuple[int, float, float]]], out: Path) -> None:
    """Writes the figure beside and renames it; its format is that of the name."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "joestar", "svg.fonttype": "none"}  # the same numbers: the same file
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    worlds = sorted({world for points in found.values() for world, *_ in points})
    left.plot(worlds, worlds, color="0.7", linestyle="--", label="ideal")
    for model, points in found.items():
        left.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=model)
        right.plot([p[0] for p in points], [100 * p[2] for p in points], marker="o", label=model)
    left.set(xlabel="GPUs", ylabel="speed-up of an epoch", xticks=worlds)
    right.set(xlabel="GPUs", ylabel="sum over the ranks, % of a step", xticks=worlds, ylim=(0, None))
    left.legend(frameon=False)
    right.legend(frameon=False)
    descriptor, beside = tempfile.mkstemp(dir=out.parent, suffix=out.suffix)
    os.close(descriptor)
    try:
        figure.savefig(beside, metadata={"Date": None} if out.suffix == ".svg" else None)
        os.chmod(beside, 0o644)
        os.replace(beside, out)
    except BaseException:
        os.unlink(beside)
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON of joestar bench epoch --gpus")
    parser.add_argument("--out", type=Path, default=Path("scaling.svg"), help="figure: .svg, .png, .pdf")
    options = parser.parse_args()
    draw(curves([row for file in options.files for row in json.loads(file.read_text())["rows"]]), options.out)


if __name__ == "__main__":
    main()
