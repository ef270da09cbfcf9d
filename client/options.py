"""How a client behaves. Values only; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal, get_args

from kvstore.client.access import OPEN, Access
from kvstore.client.chunk import Shard
from kvstore.proto.errors import InvalidRequestError, check_text, is_whole
from kvstore.proto.keys import check_chunk_tokens
from kvstore.proto.types import DEFAULT_CHUNK_TOKENS

TransportName = Literal["auto", "shm", "tcp", "grpc"]

MAX_DEADLINE_MS = 600_000
"""The longest that a server grants."""
MAX_NAME_CHARS = 128
"""Of a client's name and of a tenant's."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """``transport`` auto takes shared memory on the server's host; elsewhere tcp where the server
    offers it, else gRPC.

    ``deadline_ms`` bounds every call. ``staging_bytes`` of memory are shared with the server
    to put through; four frames at least, whatever is given. After the server did not answer,
    calls fail at once for ``retry_after_ms``
    rather than wait again. ``name`` shows in the server's log and status. ``copy_threads``
    verify and copy what a get of several chunks brings. ``assets`` is a folder of model assets,
    as ``kvstore calibrate`` writes them, for frames that are read as they lie on a tier.
    ``access`` says who the client is, ``tenant`` whose chunks it is about: empty for those of
    whoever it is, or ``pool:NAME`` for a pool that tenants share. With ``read_peers`` what another
    node has in memory is read from there, where the server says so and its port is reached.
    With ``sglang_names`` prompts that are named by nothing but their tokens are named as SGLang
    names them, which finds its pages where they have ``chunk_tokens`` tokens. With a ``shard`` the
    KV that is put and got is that of one rank of a parallel engine, of ``shard.part_of(model)``;
    layer by layer there are whole chunks only.
    """

    transport: TransportName = "auto"
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    deadline_ms: int = 2000
    staging_bytes: int = 34 << 20
    retry_after_ms: int = 1000
    name: str = ""
    copy_threads: int = 2
    assets: Path | None = None
    access: Access = OPEN
    tenant: str = ""
    read_peers: bool = True
    sglang_names: bool = False
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.transport not in get_args(TransportName):
            fix = "use auto, shm, tcp or grpc"
            if str(self.transport) == "zmq":
                fix = "there is no such transport any more; use tcp"
            raise InvalidRequestError("transport", self.transport, fix)
        check_chunk_tokens(self.chunk_tokens)
        for name in ("deadline_ms", "staging_bytes", "retry_after_ms", "copy_threads"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise InvalidRequestError(name, value, "give a positive whole number")
        for name in ("name", "tenant"):
            check_text(name, getattr(self, name), MAX_NAME_CHARS)
        if self.deadline_ms > MAX_DEADLINE_MS:
            raise InvalidRequestError("deadline_ms", self.deadline_ms, f"at most {MAX_DEADLINE_MS}")


def milliseconds(name: str, seconds: float, most_s: float) -> int:
    """Return *seconds*, the argument *name*, in milliseconds. Raises InvalidRequestError."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= seconds <= most_s:
        raise InvalidRequestError(name, seconds, f"give 0 to {most_s:g} seconds")
    return round(1000 * float(seconds))
