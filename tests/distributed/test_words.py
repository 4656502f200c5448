"""``distributed.words``: every rank hears of every step what all have said, however far they are apart."""

import random
import threading
import time

import pytest
import torch

from joestar.distributed.words import _APART, HostWords

STEPS = 100


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_hear_the_same_of_every_step(world):
    words = torch.zeros(2 * world * _APART, dtype=torch.int64)
    said = [[random.Random(100 * rank + 7).random() < 0.9 for _ in range(STEPS)] for rank in range(world)]
    heard = [[] for _ in range(world)]

    def work(rank):
        own, pauses = HostWords(words, rank, world), random.Random(rank)
        for word in said[rank]:
            if pauses.random() < 0.05:
                time.sleep(0)
            heard[rank].append(own.all(word, lambda: None))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == [[all(column) for column in zip(*said, strict=True)]] * world


def test_who_waits_looks_after_the_others():
    words = HostWords(torch.zeros(2 * 2 * _APART, dtype=torch.int64), 0, 2)

    def watch():
        raise RuntimeError("rank 1 was killed")

    with pytest.raises(RuntimeError, match="was killed"):
        words.all(True, watch)
