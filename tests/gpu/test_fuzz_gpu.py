"""Random programs on a GPU, against plain PyTorch there, in float64: passes take other ways than on a CPU.

More of them: ``JOESTAR_TEST_DEVICE=cuda PYTHONPATH=tests python -m fuzz --range 0 3000 --workers 12``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SCRIPT = """
import json, sys
from fuzz.execute import Report, run_pack
from fuzz.workers import quiet

quiet()
report = Report()
run_pack(int(sys.argv[1]), report, backend=sys.argv[2])
print(json.dumps({"programs": report.programs, "plain": report.plain, "wrong": report.wrong}))
"""


@pytest.mark.parametrize(("pack", "backend"), [(14, "eager"), (21, "eager"), (32, "eager"), (1, "inductor")])
def test_random_programs(pack, backend):
    """Packs whose gradients were off in the eighth digit when scales of dropout were float32 (all but the last)."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / "tests"), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"JOESTAR_TEST_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(pack), backend], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], "\n".join(found["wrong"])[:8000]
    assert found["programs"] == 5 and found["plain"] >= 3
