"""A Unix socket that only this user's processes reach, and that nobody can swap."""

from __future__ import annotations

import os
import select
import socket
import stat
from pathlib import Path

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.unix_socket import peer_ids

_BACKLOG = 128
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def is_trusted(connection: socket.socket) -> bool:
    """Whether the peer runs as this server's user, or as root."""
    return peer_ids(connection)[1] in (os.geteuid(), 0)


def listen(path: Path) -> socket.socket:
    """Return a listening SOCK_SEQPACKET socket at *path*, for this user only.

    Raises InvalidRequestError when the path cannot be used or another server listens there.
    """
    _make_folder(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if os.path.lexists(path):
            if not path.is_socket():
                raise InvalidRequestError(
                    "socket_path",
                    str(path),
                    "something else is there; choose another with --socket",
                )
            _refuse_second_server(path)
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, InvalidRequestError) as error:
        listener.close()
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(
            "socket_path", str(path), f"{error.strerror or error}; choose another with --socket"
        ) from None
    return listener


def _make_folder(folder: Path) -> None:
    """Make the socket's folder, or refuse one in which others could swap the socket."""
    try:
        missing = [one for one in folder.parents if not one.exists()]
        for one in (*reversed(missing), folder):
            one.mkdir(mode=0o700, exist_ok=True)
        real, owners = folder.resolve(), _trusted_owners()
        folders = {real, *real.parents, *folder.parents}
        swappable = [one for one in folders if _is_swappable(one, owners)]
    except OSError as error:
        raise InvalidRequestError(
            "socket_path", str(folder), f"{error.strerror}; choose another with --socket"
        ) from None
    if swappable:
        fix = f"others could swap the socket in {max(swappable)}: chmod go-w, or give --socket"
        raise InvalidRequestError("socket_path", str(folder), fix)


def _is_swappable(folder: Path, owners: set[int]) -> bool:
    """Whether others than *owners* can put something else in the place of an entry."""
    found = folder.stat()
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return bool(is_open) or found.st_uid not in owners


def _trusted_owners() -> set[int]:
    """Return this user and root, under the number that stands for it in this user namespace."""
    root = 0
    ranges = [line.split() for line in _UID_MAP.read_text().splitlines()]
    if ranges and all(int(first) for first, *_ in ranges):  # root has no number here
        root = int(_OVERFLOW_UID.read_text())
    return {os.geteuid(), root}


def _refuse_second_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left behind by a server that was killed
        except BlockingIOError:
            pass  # so many wait there already that we would have to
    raise InvalidRequestError(
        "socket_path", str(path), "another server listens there; stop it or choose --socket"
    )


def can_send(connection: socket.socket, within_s: float) -> bool:
    """Wait until *connection* takes more; whether it does."""
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(1000 * within_s))
