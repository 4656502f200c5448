"""Launches that only compile, side by side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")


def printed(script: str, folder) -> dict:
    """What a script prints, in a process of its own without a GPU, with an empty cache of kernels."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    path = Path(__file__).with_name(script)
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.fuzz
def test_candidates_are_compiled_and_do_not_run(tmp_path):
    """Nor does what is launched within; other threads' launches do; errors, and another such mode, change nothing."""
    found = printed("ahead.py", tmp_path)
    assert found["compiled"] == [3, []]
    assert found["others"] == [4, [7]]
    assert found["restored"] == [True, False]
    assert found["interrupted"] == [True, True]
    assert found["user's"] == [4, [7]]
    assert found["ran"] == [7, 16]


@pytest.mark.fuzz
def test_what_will_be_launched_is_compiled_before(tmp_path):
    """By calls with tensors that have no memory: all settings that are timed, and steps of optimizers.

    These stay as they are, and the launches find it. Two threads may compile at a time; a call's kernels are compiled
    together once.
    """
    found = printed("soon.py", tmp_path)
    tuned, kept = found["tuned"]
    assert tuned == 5 and found["launched"] == [tuned, kept]
    assert found["not timed"] == [tuned + 1, kept]
    assert found["steps"] == found["steps taken"] == [2, 2] and found["untouched"]
    assert found["both"] == [[False, False, True, True], True]
    assert found["together"] == [0, 2]
