"""What the server that ranks are forked from does once for all of them: imports, and what the first capture imports.

There is no backward pass, whose threads would not survive a fork where there are GPUs.
"""

import torch

from tests.distributed import differing_scenarios, scenarios, shard_scenarios, staged_scenarios  # noqa: F401

if not torch.cuda.is_available():
    with scenarios.cheaper(scenarios.quick):
        _step = scenarios.step_of()
        _step._ready(scenarios.ids(8), 4)
        _step.predict(scenarios.ids(8), 4)
