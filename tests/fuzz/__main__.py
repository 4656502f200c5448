"""Repeats one program, or runs many.

``PYTHONPATH=tests python -m fuzz 137 [eager|inductor]`` prints the source of program 137 and what differs.
``PYTHONPATH=tests python -m fuzz --range 3000 103000 [--workers 2]`` runs programs 3000 to 102,999 in every way and
prints the numbers of those that fail, and at the end how many were compared.
"""

import argparse
import contextlib
import multiprocessing
import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from .execute import Report, run_pack
from .generate import PER_PACK, write
from .workers import quiet, whole_pack

COUNTS = ("programs", "compared", "plain", "autocast", "trained", "narrow", "overflows", "chosen", "strange",
          "impossible")  # fmt: skip


def repeat(number: int, backend: str) -> bool:
    """Runs one program, captured in the real way, and prints all there is to know; whether it agrees."""
    print(write(number).source)
    report = Report(thorough=True)
    run_pack(number // PER_PACK, report, backend, only=number, quick=False)
    print({name: rewrites for name, rewrites in report.rewrites.items() if rewrites})
    print("\n".join([*report.refused.values(), *report.wrong]) or "every execution agrees")
    return not report.wrong


@contextlib.contextmanager
def _mapped(workers: int):
    """A function like ``map``, over so many processes."""
    if workers == 1:
        quiet()
        yield map
        return
    with multiprocessing.get_context("spawn").Pool(workers, quiet, maxtasksperchild=200) as pool:
        yield pool.imap


def run_range(first: int, last: int, workers: int) -> bool:
    """Runs the packs of programs ``first`` to ``last - 1`` in so many processes; whether all agree."""
    packs = range(first // PER_PACK, -(-last // PER_PACK))
    totals, failed, refused = dict.fromkeys(COUNTS, 0), [], 0
    with _mapped(workers) as over:
        for done, report in enumerate(over(whole_pack, packs), 1):
            totals = {name: total + getattr(report, name) for name, total in totals.items()}
            failed += report.failed
            refused += len(report.refused)
            for text in report.wrong:
                print(text.splitlines()[0], text.rpartition("---")[2].strip().replace("\n", "; ")[:400], flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(packs)} packs, {len(failed)} programs failed", flush=True)
    print({**totals, "refused": refused})
    print(f"failed: {failed}" if failed else "every execution of every program agrees")
    return not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("number", nargs="?", type=int, help="of the program to repeat")
    parser.add_argument("backend", nargs="?", default="eager", choices=("eager", "inductor"))
    parser.add_argument("--range", nargs=2, type=int, metavar=("FIRST", "LAST"), help="programs FIRST to LAST - 1")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    if (options.number is None) == (options.range is None):
        parser.error("give the number of a program, or --range FIRST LAST")
    if options.range is not None:
        return not run_range(*options.range, options.workers)
    return not repeat(options.number, options.backend)


if __name__ == "__main__":
    raise SystemExit(main())
