"""Every kernel compiles for the GPUs that it is meant for, checked without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def _compiled(cache: Path, *options: str) -> int:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout)


def test_every_kernel_compiles(tmp_path):
    assert _compiled(tmp_path) >= 45


@pytest.mark.slow
def test_every_kernel_compiles_in_every_dtype_and_setting(tmp_path):
    assert _compiled(tmp_path, "--all") >= 300
