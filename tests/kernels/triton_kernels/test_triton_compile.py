"""Every kernel compiles for the GPUs that it is meant for, and fits their registers, checked without one."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")
import triton

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def _compiled(cache: Path, *options: str) -> dict:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def _inputs() -> str:
    """A digest of what the result depends on: versions, kernels and their launchers, samples of the ops."""
    root = Path(__file__).parents[3]
    folders = (root / "joestar" / "kernels", root / "joestar" / "ops", root / "tests" / "ops")
    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__} {sys.version}".encode())
    for path in [SCRIPT, *sorted(path for folder in folders for path in folder.rglob("*.py"))]:
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@pytest.mark.fuzz
def test_every_kernel_compiles_and_spills_no_registers(request):
    """What came of it stays in pytest's cache, and so do binaries, under a hash of source, settings and compiler."""
    digest, cache = _inputs(), request.config.cache
    known, found = cache.get("joestar/compiled", (None, None))
    if known != digest:
        found = _compiled(cache.mkdir("triton"))
        cache.set("joestar/compiled", (digest, found))
    assert not found["missing"], "call them in compile_kernels.py, or give their op a sample in the op database"
    assert found["kernels"] >= 100 and len(found["resources"]) == found["kernels"]
    assert all(0 < row["registers"] <= 255 for row in found["resources"])
    spilling = [row for row in found["resources"] if row["stack"]]
    assert not spilling, spilling
    hasty = [row for row in found["resources"] if row["register_products"]]
    assert not hasty, f"Triton lets registers be overwritten while products read them (its issue 9433): {hasty}"
    blunt = {row["kernel"]: row["floats"] for row in found["resources"] if row["floats"]}
    assert not blunt, (
        f"a Python number becomes a float32: in float64 that is wrong. Say tl.float64, or constexpr: {blunt}"
    )
    _check_wide_rows(found["resources"])
    shards = [row for row in found["resources"] if row["kernel"] == "gpu_shards._gather_shards"]
    assert {row["vectors"] > 0 for row in shards if row["ALIGNED"] == 16} == {True}, "peers are read 16 bytes at a time"
    shuffles = [row for row in found["resources"] if row["kernel"] == "gpu_shuffle._shuffle_keys"]
    assert len(shuffles) == 1, "every epoch has another state: it must not lead to another binary"


def _check_wide_rows(rows: list[dict]) -> None:
    """Rows of 20,000 columns are read in loops: their kernels are no longer than those of narrow ones."""
    lengths = {name: {} for name in ("gpu_fused._sample_aggregate", "gpu_edge_products._edge_products")}
    for row in rows:
        if row["kernel"] in lengths:
            longest = lengths[row["kernel"]]
            longest[row["WIDTH"]] = max(longest.get(row["WIDTH"], 0), row["ptx"])
    for kernel, longest in lengths.items():
        widest = max(longest)
        assert widest >= 20_000 and len(longest) > 1, (kernel, longest)
        narrow = max(length for width, length in longest.items() if width < widest)
        assert longest[widest] <= 3 * narrow, (kernel, longest)


@pytest.mark.slow
@pytest.mark.long
def test_every_kernel_compiles_in_every_dtype_and_setting(tmp_path):
    assert _compiled(tmp_path, "--all")["kernels"] >= 300
