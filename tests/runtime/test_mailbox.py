"""Messages of steps as the host reads them; here the test is the device."""

import threading

import torch

from joestar.ops.step.launches import TAG_BITS
from joestar.runtime import mailbox as mailbox_module
from joestar.runtime.mailbox import Mailbox


def words(number: int, *values: int) -> list[int]:
    return [value << TAG_BITS | number & ((1 << TAG_BITS) - 1) for value in values]


def post(mailbox: Mailbox, message: list[int]) -> None:
    for index, word in enumerate(message):
        mailbox._words[index] = word


def test_messages_are_read_in_turn_and_numbers_wrap():
    mailbox = Mailbox(torch.device("cpu"), 2)
    mailbox.number = (1 << TAG_BITS) - 2
    mailbox.start()
    assert int(mailbox.sequence) == mailbox.number
    for ok, counts in ((1, (7, 2**40)), (0, (8, 9)), (1, (0, 0))):
        post(mailbox, words(mailbox.number + 1, ok, *counts))
        assert mailbox.wait() == (bool(ok), list(counts))


def test_half_a_message_is_waited_for(monkeypatch):
    """The last word comes late, from another thread: the old one must not be taken for it."""
    monkeypatch.setattr(mailbox_module, "_SLICE", 1)
    mailbox = Mailbox(torch.device("cpu"), 1)
    mailbox.start()
    post(mailbox, words(1, 1, 5))
    assert mailbox.wait() == (True, [5])
    post(mailbox, words(2, 0))  # the size is still that of the first message
    late = threading.Event()
    monkeypatch.setattr(Mailbox, "_look", lambda *_: late.set())

    def rest():
        late.wait()
        mailbox._words[1] = words(2, 6)[0]

    thread = threading.Thread(target=rest)
    thread.start()
    assert mailbox.wait() == (False, [6]) and late.is_set()
    thread.join()


def test_the_kernels_tag_is_the_hosts():
    from joestar.kernels import gpu_mailbox

    assert gpu_mailbox.TAG_BITS == TAG_BITS
