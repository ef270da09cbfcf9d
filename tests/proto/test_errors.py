from __future__ import annotations

import grpc
import pytest

from kvstore.proto import errors
from kvstore.proto.errors import KVStoreError, revive

EXAMPLES: list[KVStoreError] = [
    KVStoreError("plain"),
    errors.InvalidRequestError("limit", 7, "at most 5"),
    errors.InvalidFrameError("magic", b"\0", "expected KVFR"),
    errors.ModelError("model_id", "", "name the model"),
    errors.LayoutMismatchError("shape", (1, 2), "give (2, 1)"),
    errors.UnknownCodecError("gzip", "raw, lossless"),
    errors.LeaseExpiredError("lease 5"),
    errors.TierFullError("cpu", 100, 50),
    errors.QuotaExceededError("max_leases", 10, "session 3"),
    errors.ChunkCorruptError(bytes(32), "layer 3 fails its checksum"),
    errors.TierUnavailableError("redis", "connection refused"),
    errors.DeadlineError("5 ms passed"),
    errors.ShuttingDownError("draining"),
    errors.UnauthenticatedError("no token"),
    errors.PermissionDeniedError("not an admin"),
]


def named(error: KVStoreError) -> str:
    return type(error).__name__


def test_every_class_has_an_example_here() -> None:
    public = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, KVStoreError) and not name.startswith("_")
    }
    assert {named(error) for error in EXAMPLES} == public


def test_an_error_that_travelled_is_the_same_class_and_message() -> None:
    for error in EXAMPLES:
        revived = revive(named(error), str(error))
        assert type(revived) is type(error)
        assert str(revived) == str(error) != ""
        assert revived.status == error.status in grpc.StatusCode.__members__
        assert error.status not in ("OK", "CANCELLED", "UNKNOWN")
        with pytest.raises(type(error)):
            raise revived


def test_an_unknown_name_becomes_a_plain_error() -> None:
    for name in ["FutureError", "", "Exception", "SystemExit"]:
        revived = revive(name, "from a newer server")
        assert type(revived) is KVStoreError
        assert str(revived) == "from a newer server"


def test_builtin_kinds_are_kept_for_callers_that_know_only_those() -> None:
    assert issubclass(errors.InvalidFrameError, ValueError)
    assert issubclass(errors.InvalidRequestError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)


def test_messages_name_the_field_and_cut_long_values() -> None:
    error = errors.InvalidRequestError("tokens", list(range(10000)), "too many")
    assert error.field == "tokens"
    assert str(error).startswith("tokens=[0, 1, 2")
    assert str(error).endswith("...: too many")
    assert len(str(error)) < 150


def test_errors_carry_what_their_caller_decides_by() -> None:
    full = errors.TierFullError("cpu", 100, 50)
    assert (full.tier, full.need_bytes, full.free_bytes) == ("cpu", 100, 50)
    assert errors.ChunkCorruptError(b"k" * 32, "cut").key == b"k" * 32
    assert errors.QuotaExceededError("max_leases", 10, "session 3").limit == "max_leases"
    assert errors.TierUnavailableError("redis", "gone").tier == "redis"
