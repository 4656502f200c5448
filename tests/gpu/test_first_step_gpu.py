"""With empty caches, what a first step will launch is compiled beside, before it is launched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.long]

SCRIPT = """
import collections, json, threading
import torch
from torch.nn import functional as F
from triton.runtime.jit import JITFunction
import joestar
from joestar.bench.planted import planted

compiled, do_compile = collections.defaultdict(set), JITFunction._do_compile

def noted(self, *args, **kwargs):
    compiled[threading.current_thread().name == "joestar-compile-ahead"].add((self.module, self.fn.__name__))
    return do_compile(self, *args, **kwargs)

JITFunction._do_compile = noted
graph = planted("mini", torch.device("cuda"))
torch.manual_seed(0)
net = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 64, 3, int(graph.ndata["y"].max()) + 1, dropout=0.5).cuda()
step = joestar.compile(net, joestar.NeighborSampler(graph, [10, 5, 5]), F.cross_entropy,
                       torch.optim.Adam(net.parameters(), 1e-3))
losses = [float(loss) for loss, _ in zip(step.epoch(graph.train_idx, 500), range(3))]
print(json.dumps({"losses": losses, **{str(beside): sorted(map(list, found)) for beside, found in compiled.items()}}))
"""


def test_kernels_of_the_step_are_compiled_beside(tmp_path):
    """The optimizer's and those of both passes."""
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "JOESTAR_CACHE": "joestar"}
    environment = os.environ | {name: str(tmp_path / folder) for name, folder in caches.items()}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    beside = {name for _, name in map(tuple, found["True"])}
    assert {"_adam"} < beside and len(beside) >= 8, beside
    assert any(name.endswith("_grad") for name in beside), beside
    assert all(0 < loss < 20 for loss in found["losses"])
