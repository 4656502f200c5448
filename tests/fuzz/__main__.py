"""Repeats one program: ``PYTHONPATH=tests python -m fuzz 137 [eager|inductor]`` prints its source and what differs."""

import sys

from .execute import Report, run_pack
from .generate import PER_PACK, write

number = int(sys.argv[1])
print(write(number).source)
report = Report()
run_pack(number // PER_PACK, report, *sys.argv[2:3], only=number)
print({name: rewrites for name, rewrites in report.rewrites.items() if rewrites})
print("\n".join([*report.refused.values(), *report.wrong]) or "every execution agrees")
