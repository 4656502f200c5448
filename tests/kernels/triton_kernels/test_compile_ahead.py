"""Launches that only compile, side by side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")


@pytest.mark.fuzz
def test_candidates_are_compiled_and_do_not_run(tmp_path):
    """Nor does what is launched within; other threads' launches do; errors, and another such mode, change nothing."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("ahead.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["compiled"] == [3, []]
    assert found["others"] == [4, [7]]
    assert found["restored"] == [True, False]
    assert found["interrupted"] == [True, True]
    assert found["user's"] == [4, [7]]
    assert found["ran"] == [7, 16]
