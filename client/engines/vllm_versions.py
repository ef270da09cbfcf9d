"""What the vLLM that is installed has of what came or changed between 0.26 and 0.33.

Found by looking, not by its number: whoever needs to know asks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import vllm
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.tiering.base import JobResult

from kvstore.client.engines.vllm_shape import EngineShape
from kvstore.proto.errors import ModelError

OLDEST, NEWEST = (0, 26), (0, 33)
"""Releases that the connector is written for. vLLM's interface of connectors changes with them."""


TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""What says which loads failed as a whole. None, below 0.30: vLLM asks for failed blocks only."""

HAS_BLOCK_TABLES = hasattr(getattr(output, "KVConnectorBlockState", None), "get_block_ids")
"""Whether a step comes with the block tables of all its requests: from 0.30 on."""

event_keys: Callable[[list[Any]], Any] = getattr(
    kv_cache_utils, "to_event_extra_keys", lambda keys: keys
)
"""How events write what else names blocks; below 0.31 as it is."""

STORAGE_MEDIUM: Any = getattr(getattr(offload, "Medium", None), "STORAGE", None)
"""What a tier below vLLM's offloading says that it is; 0.26 does not ask."""

TELLS_KEYS_THAT_CAME = "successful_keys" in JobResult.__dataclass_fields__
"""Whether a tier can say that part of a promotion came; below 0.28 all of it fails."""


def job_rows(job: Any) -> Any:
    """Return the places in vLLM's CPU memory of a tier's *job*; below 0.30 they were blocks."""
    return job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids


def _known(event: Any) -> Callable[..., Any]:
    """Return what makes an *event*, without the fields that this release does not have."""
    names = event.__struct_fields__
    return lambda **said: event(**{name: value for name, value in said.items() if name in names})


block_stored, block_removed = _known(kv_events.BlockStored), _known(kv_events.BlockRemoved)


def untested() -> str:
    """Return what there is to say of a release that the connector is not written for, or ""."""
    found = vllm.__version__
    numbers = [int(part) for part in found.split(".")[:2] if part.isdecimal()]
    if OLDEST <= tuple(numbers) <= NEWEST:
        return ""
    first, last = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return f"kvstore is written for vLLM {first} to {last}, not {found}"


def check_loads_can_fail(shape: EngineShape) -> None:
    """Raise ModelError where vLLM would take a load that failed for a whole one.

    Of several block tables, or of windows, it has to compute all: blocks are not enough.
    """
    if (shape.has_ends or shape.tables > 1) and TransferResults is None:
        what = "sliding windows" if shape.has_ends else f"{shape.tables} KV cache groups"
        fix = f"vLLM {vllm.__version__} cannot be told that a load of it failed; 0.30 can"
        raise ModelError("kv_cache_groups", what, fix)
