"""The arena: the server's device memory, mapped into this process."""

from __future__ import annotations

from typing import TypeAlias

import torch

from kvstore.client.session import SessionTerms
from kvstore.client.transports.shared_memory import Slabs
from kvstore.proto.device import Imported, open_device
from kvstore.proto.errors import TierUnavailableError
from kvstore.proto.unix_socket import ARENA_SLAB

Arena: TypeAlias = Imported


def open_arena(terms: SessionTerms, slabs: Slabs) -> Arena:
    """Map the memory of the server's gpu tier.

    Raises TierUnavailableError when it has none, or this process does not see its device.
    """
    if not terms.arena_device:
        raise TierUnavailableError("cuda", "the server shares no GPU memory: start it with gpu")
    device = open_device(_device_called(terms.arena_device))
    return device.import_memory(slabs.slab(ARENA_SLAB).data, terms.arena_bytes)


def _device_called(identity: str) -> torch.device:
    if identity == "cpu":  # a test's stand-in for a device
        return torch.device("cpu")
    seen = [
        f"cuda:{torch.cuda.get_device_properties(at).uuid}"
        for at in range(torch.cuda.device_count())
    ]
    if identity not in seen:
        raise TierUnavailableError(
            "cuda", f"the server's device {identity} is not among {seen or 'none'}:"
            " run on it, or use another transport",
        )  # fmt: skip
    return torch.device("cuda", seen.index(identity))
