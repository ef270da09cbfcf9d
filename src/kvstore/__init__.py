"""kvstore: a multi-tier KV-cache store for LLM inference that may forget, but never lies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvstore.proto import __version__

if TYPE_CHECKING:
    from kvstore.client import AsyncClient as AsyncClient
    from kvstore.client import Client as Client
    from kvstore.client import ClientOptions as ClientOptions
    from kvstore.client import Hit as Hit
    from kvstore.client import Lease as Lease
    from kvstore.client import PagedCache as PagedCache
    from kvstore.client import Shard as Shard
    from kvstore.proto.errors import ChunkCorruptError as ChunkCorruptError
    from kvstore.proto.errors import DeadlineError as DeadlineError
    from kvstore.proto.errors import InvalidFrameError as InvalidFrameError
    from kvstore.proto.errors import InvalidRequestError as InvalidRequestError
    from kvstore.proto.errors import KVStoreError as KVStoreError
    from kvstore.proto.errors import LayoutMismatchError as LayoutMismatchError
    from kvstore.proto.errors import LeaseExpiredError as LeaseExpiredError
    from kvstore.proto.errors import ModelError as ModelError
    from kvstore.proto.errors import PermissionDeniedError as PermissionDeniedError
    from kvstore.proto.errors import QuotaExceededError as QuotaExceededError
    from kvstore.proto.errors import ShuttingDownError as ShuttingDownError
    from kvstore.proto.errors import TierFullError as TierFullError
    from kvstore.proto.errors import TierUnavailableError as TierUnavailableError
    from kvstore.proto.errors import UnauthenticatedError as UnauthenticatedError
    from kvstore.proto.errors import UnknownCodecError as UnknownCodecError
    from kvstore.proto.types import Accuracy as Accuracy
    from kvstore.proto.types import Model as Model

_CLIENT = ("AsyncClient", "Client", "ClientOptions", "Hit", "Lease", "PagedCache", "Shard")
_TYPES = ("Accuracy", "Model")
_ERRORS = (
    "ChunkCorruptError", "DeadlineError", "InvalidFrameError", "InvalidRequestError",
    "KVStoreError", "LayoutMismatchError", "LeaseExpiredError", "ModelError",
    "PermissionDeniedError", "QuotaExceededError", "ShuttingDownError", "TierFullError",
    "TierUnavailableError", "UnauthenticatedError", "UnknownCodecError",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_CLIENT, "kvstore.client"),
    **dict.fromkeys(_TYPES, "kvstore.proto.types"),
    **dict.fromkeys(_ERRORS, "kvstore.proto.errors"),
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import what is named when it is first used: the server, for one, needs nothing of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return those names, too, for completion."""
    return sorted({*globals(), *__all__})
