"""Run by `make wheel-test` in a clean environment without a compiler: an installed wheel trains and predicts."""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def command(*arguments: str, code: int = 0) -> str:
    """Output of ``joestar ...``."""
    program = Path(sys.executable).with_name("joestar")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, f"joestar {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def main() -> None:
    for compiler in ("gcc", "g++", "cc", "c++", "clang", "cmake"):
        assert shutil.which(compiler) is None, f"{compiler} is there: this would prove nothing"
    import joestar
    from joestar import _native

    assert "site-packages" in joestar.__file__, joestar.__file__
    assert _native.build_info()["threads"] >= 1
    facts = importlib.metadata.metadata("joestar")
    assert facts["Version"] == joestar.__version__ and facts["License-Expression"] == "Apache-2.0"
    assert facts["Description-Content-Type"] == "text/markdown" and "Typing :: Typed" in facts.get_all("Classifier")
    files = {str(path) for path in importlib.metadata.files("joestar")}
    for name in ("joestar/py.typed", "joestar/cli/facts.json", "joestar/data/bundled/cora.npz"):
        assert name in files, name
    assert not [name for name in files if name.startswith(("tests", "csrc", "docs"))]
    assert command("--version") == f"joestar {joestar.__version__}\n"
    assert "Joestar can run here." in command("doctor")
    assert "2,708" in command("info")
    with tempfile.TemporaryDirectory() as folder:
        best, table = f"{folder}/best.pt", f"{folder}/p.csv"
        shown = command("train", "--epochs", "3", "--save", best)
        assert "nothing was compiled" in shown, shown
        assert "accuracy" in command("evaluate", best)
        command("predict", best, "--out", table)
        assert len(Path(table).read_text().splitlines()) == 2709
    print(f"the wheel works: Python {sys.version.split()[0]}, PyTorch {importlib.metadata.version('torch')}")


if __name__ == "__main__":
    main()
