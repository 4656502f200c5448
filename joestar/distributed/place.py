"""Which process this is, as launchers say it in the environment, and which device is its own."""

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from joestar.errors import ConfigError, DistributedError

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets. ``LOCAL_WORLD_SIZE`` is looked at, too."""
MOST_PORT = 65535
_NO_HOST = re.compile(r"[\s/@]")


def host_name() -> str:
    """The same for all processes of a host, and for no others: containers of several hosts may share a name."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return name


def early_word() -> str:
    """How ranks learn whether a captured step fits on all of them, as ``JOESTAR_EARLY_WORD`` says.

    ``"1"``: right behind the sampling, from one another if they are on one host; ``"device"``: by a sum there, in any
    case; ``"0"``: with the gradients.

    Raises:
        ConfigError: for another word.
    """
    word = said_word()
    if word not in ("0", "1", "device"):
        raise ConfigError(f"JOESTAR_EARLY_WORD in the environment must be 0, 1 or device, or not be set; got {word!r}.")
    return word


def said_word() -> str:
    """What ``JOESTAR_EARLY_WORD`` says, whether or not it can be."""
    return os.environ.get("JOESTAR_EARLY_WORD") or "1"


def rank_sum() -> str:
    """What adds gradients up over the GPUs of one host, as ``JOESTAR_RANK_SUM`` says: our ``"kernel"``, or ``"nccl"``.

    Raises:
        ConfigError: for another word.
    """
    word = said_sum()
    if word not in ("kernel", "nccl"):
        raise ConfigError(f"JOESTAR_RANK_SUM in the environment must be kernel or nccl, or not be set; got {word!r}.")
    return word


def said_sum() -> str:
    """What ``JOESTAR_RANK_SUM`` says, whether or not it can be."""
    return os.environ.get("JOESTAR_RANK_SUM") or "kernel"


def shown_host(name: str) -> str:
    """A ``host_name`` for messages."""
    return name.partition(" ")[0]


@dataclass(frozen=True)
class Place:
    """A process among others.

    Attributes:
        rank, world: number of this process and of all; local_rank, local_world: on this host.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """What torchrun, or a launcher like it, says; a process of its own without one.

    Raises:
        ConfigError: if only a part of it is there, or it cannot be.
    """
    if "WORLD_SIZE" not in environment and "RANK" not in environment:
        return Place()
    if environment.get("WORLD_SIZE") == "1":
        return Place()
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        given = "WORLD_SIZE" if "WORLD_SIZE" in environment else "RANK"
        raise ConfigError(
            f"the environment lacks {', '.join(missing)}, while {given} is set: start the script with "
            "torchrun --nproc-per-node N, or set all of them."
        )
    local_world = environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    numbers = [_number(name, environment[name]) for name in names] + [_number("LOCAL_WORLD_SIZE", local_world)]
    rank, world, local_rank, local = numbers
    if not (0 <= rank < world and 0 <= local_rank < local <= world):
        raise ConfigError(
            f"RANK {rank}, WORLD_SIZE {world}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local} do not fit: ranks "
            "count from 0 and are smaller than their number."
        )
    return Place(rank, world, local_rank, local)


def check_address(host: str, port: str) -> None:
    """Raises ``DistributedError`` if processes cannot meet at such an address."""
    remedy = (
        "Set MASTER_ADDR to the name or address of rank 0's host and MASTER_PORT to a free port there, on all ranks."
    )
    if not host or _NO_HOST.search(host) or host.count(":") == 1:  # an address of IPv6 has more of them
        raise DistributedError(
            f"MASTER_ADDR in the environment must be a host's name or address, without a port; got {host!r}. {remedy}"
        )
    number = port.strip()
    if not (number.isascii() and number.isdecimal() and len(number) <= 5 and 1 <= int(number) <= MOST_PORT):
        raise DistributedError(
            f"MASTER_PORT in the environment must be a port, from 1 to {MOST_PORT}; got {port!r}. {remedy}"
        )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name} in the environment must be a number; got {text!r}.")
    return int(text)


@dataclass(frozen=True)
class Found:
    """The devices that a process sees, and the one that it would take: compared by all before work starts.

    Attributes:
        host: its name; visible: ``CUDA_VISIBLE_DEVICES``; count: GPUs that PyTorch finds.
        device: ``cpu``, ``cuda:1``; uuid: of that GPU; "" if there is none for this rank.
    """

    host: str
    visible: str | None
    count: int
    device: str
    uuid: str = ""

    def facts(self) -> dict:
        """As plain values."""
        return asdict(self)


def find_device(place: Place, wanted: str | None = None) -> Found:
    """The device of this rank: ``cuda:LOCAL_RANK`` where there are GPUs, or the only one that it is shown.

    Args:
        wanted: ``cpu`` or ``cuda`` to insist on it.

    Raises:
        ConfigError: for another name.
    """
    if wanted not in (None, "cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or None; got {wanted!r}.")
    host, visible = host_name(), os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted != "cuda" and not count:
        return Found(host, visible, count, "cpu")
    index = place.local_rank if place.local_rank < count else 0 if count == 1 else None
    if index is None:
        return Found(host, visible, count, "cuda")
    torch.cuda.set_device(index)  # before anything asks a device: each that is used costs memory on it
    return Found(host, visible, count, f"cuda:{index}", str(torch.cuda.get_device_properties(index).uuid))


def check_devices(found: list[Found]) -> None:
    """Raises ``ConfigError``, with the same words on every rank, unless every rank has a device of its own."""
    kinds = {each.device.partition(":")[0] for each in found}
    shown = "; ".join(
        f"rank {rank} on {shown_host(each.host)}: {each.count} GPUs, CUDA_VISIBLE_DEVICES={each.visible!r}"
        for rank, each in enumerate(found)
    )
    if len(kinds) > 1:
        raise ConfigError(
            f"some ranks have a GPU and others have none ({shown}): give each one, or init(device='cpu')."
        )
    if kinds == {"cpu"}:
        return
    lacking = [rank for rank, each in enumerate(found) if not each.uuid]
    if lacking:
        raise ConfigError(
            f"ranks {', '.join(map(str, lacking))} find no GPU for them ({shown}): start as many processes per host as "
            "it shows GPUs, or init(device='cpu')."
        )
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(found):
        owners.setdefault((each.host, each.uuid), []).append(rank)
    for (host, _), ranks in owners.items():
        if len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} on {shown_host(host)} would share one GPU ({shown}): start as "
                "many processes per host as it has GPUs, and give every process all of them, or one of its own."
            )
