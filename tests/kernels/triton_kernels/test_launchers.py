"""Launchers that the C compiler makes while a kernel is compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")


def run(folder: Path, **settings: str) -> dict:
    """``beside.py`` with a cache of its own, and a library with the name of CUDA's to link to."""
    library, compiler = folder / "libcuda.so.1", os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    subprocess.run([compiler, "-shared", "-o", library, "-x", "c", os.devnull], check=True)
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": "",
        "TRITON_LIBCUDA_PATH": str(folder), **settings,
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("beside.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


HOOKED = ["before", "behind"] * 3 + ["before", "failed"]
"""Hooks of somebody else's are called as before."""


def test_a_launcher_is_on_disk_when_its_kernel_is_compiled(tmp_path):
    """One per signature, by a thread of ours; later processes find it, and make none."""
    found = run(tmp_path)
    assert found["threads"] == ["joestar-launcher"]
    assert found["found"][:3] == [[1, 1], [1, 1], [2, 2]]
    assert found["hooked"] == HOOKED
    again = run(tmp_path)
    assert again["found"][:3] == [[0, 2]] * 3
    assert again["hooked"] == HOOKED


def test_what_fails_is_left_to_triton(tmp_path):
    found = run(tmp_path, FAILS="1")
    assert found["found"][:3] == [[1, 0], [1, 0], [2, 0]]
    assert found["hooked"] == HOOKED
