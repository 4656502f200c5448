"""Launchers that the C compiler makes while a kernel is compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")


HOOKED = ["before", "behind"] * 3 + ["before", "failed"]
"""Hooks of somebody else's are called as before."""


def test_a_launcher_is_on_disk_when_its_kernel_is_compiled(tmp_path):
    """One per signature, by a thread of ours; what finds it makes none, and what fails is left to Triton."""
    library, compiler = tmp_path / "libcuda.so.1", os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    subprocess.run([compiler, "-shared", "-o", library, "-x", "c", os.devnull], check=True)
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "",
        "TRITON_LIBCUDA_PATH": str(tmp_path),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("beside.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["first"]["threads"] == ["joestar-launcher"]
    assert found["first"]["found"] == [[1, 1], [1, 1], [2, 2]]
    assert [count for count, _ in found["again"]["found"]] == [0, 0, 0]
    assert found["fails"]["found"] == [[1, 0], [1, 0], [2, 0]]
    assert all(each["hooked"] == HOOKED for each in found.values())
