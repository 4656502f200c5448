"""Seconds from ``joestar.compile`` until the first loss is there: with empty caches, and in later processes.

    python benchmarks/first_step.py                                    # SAGE on the products shape, on a GPU
    python benchmarks/first_step.py --device cpu --shape tiny --batch 100 --fanouts 5,3 --hidden 16 --layers 2

The first process has cache folders of its own (Triton's, Inductor's, Joestar's), the others (``--again``) find what it
left. One at a time. Python's compiled files are written into a folder of the script's and made by a process that only
imports, as an ordinary installation has them. ``imports``, seconds of importing torch and joestar, are not in the rest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "JOESTAR_CACHE": "joestar"}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """In a process of its own."""
    start = time.perf_counter()
    import torch
    from torch.nn import functional as F

    import joestar
    from joestar.bench.planted import planted

    imports = time.perf_counter() - start
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = options.precision == "tf32"
    graph = planted(options.shape, device)
    classes, width = int(graph.ndata["y"].max()) + 1, graph.ndata["x"].shape[1]
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(width, options.hidden, options.layers, classes, dropout=0.5).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    fanouts = [int(fanout) for fanout in options.fanouts.split(",")]
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    step = joestar.compile(net, joestar.NeighborSampler(graph, fanouts), F.cross_entropy, optimizer)
    compiled = time.perf_counter() - start
    loss = float(next(step.epoch(graph.train_idx, options.batch)))
    first = time.perf_counter() - start
    phases = {name: round(seconds, 2) for name, seconds in step.report().counters.seconds.items()}
    return {"imports": imports, "compile": compiled, "first step": first, "loss": loss, "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="products")
    parser.add_argument("--fanouts", default="15,10,5")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--precision", default="tf32", choices=("tf32", "fp32"))
    parser.add_argument("--again", type=int, default=2, help="processes that find caches filled")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / kind) for name, kind in CACHES.items()}
        environment = os.environ | caches | {"PYTHONPYCACHEPREFIX": str(Path(folder) / "python")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        warm = "import compileall, sys, torch, torch._inductor.compile_fx, joestar.bench.planted, joestar.runtime"
        subprocess.run([sys.executable, "-c", warm], env=environment, check=True)
        for number in range(1 + options.again):
            made = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--one"], env=environment, stdout=subprocess.PIPE, check=True
            )
            found = json.loads(made.stdout.splitlines()[-1])
            name = "empty caches" if number == 0 else f"process {number + 1}"
            figures = ", ".join(f"{what} {found[what]:.2f} s" for what in ("imports", "compile", "first step"))
            print(f"{name}: {figures}; {found['phases']}", flush=True)


if __name__ == "__main__":
    main()
