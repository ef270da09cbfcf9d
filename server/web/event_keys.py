"""The CURVE keys of published events: made at the first start, in a folder of its user's alone."""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.proto.errors import InvalidRequestError

SECRET_NAME = "server.secret"  # noqa: S105 - a file's name
_KEY_CHARS = 40


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair as Z85 text of 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


def load_keys(folder: Path) -> CurveKeys:
    """Return the keys kept in *folder*, made there when there are none.

    Raises InvalidRequestError when the folder or the key cannot be used, or others could read
    them.
    """
    import zmq

    path = folder / SECRET_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_open(folder)
        if not path.exists():
            _write(path, zmq.curve_keypair()[1])
        _refuse_if_open(path)
        secret = path.read_bytes().strip()
    except OSError as error:
        fix = f"{error.strerror}; name a folder that this user can write"
        raise InvalidRequestError("events_keys", str(folder), fix) from None
    try:
        return CurveKeys(zmq.curve_public(secret), secret)
    except (ValueError, zmq.ZMQError):
        fix = f"holds no key of {_KEY_CHARS} characters; delete it to have another made"
        raise InvalidRequestError("events_keys", str(path), fix) from None


def _write(path: Path, secret: bytes) -> None:
    """Write the key whole or not at all; of two servers that start together one wins."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # of mode 0600
    try:
        os.write(descriptor, secret + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)


def _refuse_if_open(path: Path) -> None:
    found = path.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidRequestError(
            "events_keys", str(path), "others could read the key; chown it to this user, chmod go="
        )
