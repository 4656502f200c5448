"""Questions and answers: the page runs, its link prediction learns, and its loop for several GPUs runs on two ranks."""

import os
import subprocess
import sys

import pytest

from tests.docs.pages import DOCS, blocks, run_page

PAGE = DOCS / "faq.md"
SCORES = """
z = joestar.inference(net, graph)
pairs = torch.randint(graph.num_nodes, (2, 5000))
print("scores", (z[source] * z[target]).sum(1).mean().item(), (z[pairs[0]] * z[pairs[1]]).sum(1).mean().item())
"""


@pytest.mark.usefixtures("cheapest_captures")
def test_the_page_runs_and_links_are_told_from_random_pairs(tmp_path):
    def edit(block):
        return block._replace(code=block.code + SCORES) if "unique(return_inverse=True)" in block.code else block

    printed = run_page(PAGE, tmp_path, edit)
    (scores,) = [text.split()[1:] for text in printed if text.startswith("scores")]
    of_edges, of_pairs = map(float, scores)
    assert of_edges > of_pairs + 0.5  # before training both are below 0.1


@pytest.mark.slow
def test_two_ranks_take_the_same_steps(tmp_path):
    found = [block.code for block in blocks(PAGE) if block.language == "python"]
    setup, ranks = found[0], next(code for code in found if "init_process_group" in code)
    total = "sum(p.double().sum().item() for p in net.parameters())"
    line = f"f'sum {{{total}}} {{len(seeds)}}\\n'"  # written at once: both ranks have the same output
    code = f"{setup}\n{ranks}\nimport sys\nsys.stdout.write({line})\n"
    code = code.replace("slack=0.5", 'slack=0.5, backend="eager"')
    program = tmp_path / "train.py"
    program.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    sums = [line for line in done.stdout.splitlines() if line.startswith("sum")]
    assert len(sums) == 2 and sums[0] == sums[1]
