from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from helpers.local_server import eventually

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.security import audit_log
from kvstore.server.security.audit_log import AuditLog, Event, audit_files, read_chain

EVENT = Event("key:1", "acme", "Clear", "OK", "00ff", 3, "unix")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def write(path: Path, count: int, file_bytes: int = 1 << 20) -> str:
    """Write *count* events, and return the last hash."""
    log = AuditLog(path, file_bytes, lambda: 1.5)
    for _ in range(count):
        log.note(EVENT)
    log.close()
    return log.last


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def chain(path: Path) -> list[str]:
    return [digest for _, digest in read_chain(audit_files(path))]


def test_a_line_says_who_did_what_and_follows_the_one_before(path: Path) -> None:
    last = write(path, 3)
    fields = [json.loads(line) for line in lines(path)]
    assert fields[0] | {"hash": "", "before": ""} == {
        "at": 1.5, "n": 0, "who": "key:1", "tenant": "acme", "rpc": "Clear", "outcome": "OK",
        "key_prefix": "00ff", "chunks": 3, "peer": "unix", "hash": "", "before": "",
    }  # fmt: skip
    assert [one["before"] for one in fields[1:]] == [one["hash"] for one in fields[:-1]]
    assert chain(path)[-1] == last == fields[-1]["hash"]


def test_the_chain_goes_on_after_a_restart_and_over_files_that_were_set_aside(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "KEPT_FILES", 3)
    write(path, 5, file_bytes=600)
    write(path, 50, file_bytes=600)
    assert [file.name for file in audit_files(path)] == ["audit.2", "audit.1", "audit"]
    assert len(chain(path)) < 20
    assert int(json.loads(lines(path)[-1])["n"]) == 54
    assert path.stat().st_mode & 0o077 == 0


def test_a_log_that_was_tampered_with_shows_it_and_is_not_gone_on_with(path: Path) -> None:
    write(path, 4)
    kept = lines(path)
    changed = {
        "changed": [kept[0], kept[1].replace(b"acme", b"zeta"), *kept[2:]],
        "left out": [kept[0], *kept[2:]],
        "put in": [*kept[:2], kept[1], *kept[2:]],
        "swapped": [kept[0], kept[2], kept[1], kept[3]],
        "cut short": [*kept[:3], kept[3][:40]],
    }
    for found in changed.values():
        path.write_bytes(b"".join(found))
        with pytest.raises(InvalidRequestError, match="audit_log"):
            chain(path)
    path.write_bytes(b"".join(kept).replace(b"acme", b"zeta"))  # at its end, too
    for place, why in ((path, "changed"), (path.parent / "none" / "audit", "audit_log")):
        with pytest.raises(InvalidRequestError, match=why):
            AuditLog(place, 1 << 20, lambda: 0.0)


def test_a_line_that_a_kill_tore_off_is_dropped_at_the_start(path: Path) -> None:
    write(path, 3)
    path.write_bytes(path.read_bytes() + b'{"at": 1')
    write(path, 1)
    assert len(chain(path)) == 4


@pytest.fixture
def slow(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AuditLog, threading.Event]]:
    """A log whose disk is stuck until the event is set."""
    go, write_now = threading.Event(), AuditLog._write

    def stuck(self: AuditLog, at_s: float, event: Event, lost: int) -> None:
        go.wait(20)
        write_now(self, at_s, event, lost)

    monkeypatch.setattr(AuditLog, "_write", stuck)
    log = AuditLog(path, 1 << 24, lambda: 1.5)
    yield log, go
    go.set()
    log.close()


def test_a_slow_disk_holds_nobody_up_and_what_is_dropped_is_counted(
    path: Path, slow: tuple[AuditLog, threading.Event]
) -> None:
    log, go = slow
    log.note(EVENT)
    assert eventually(log._events.empty)
    for _ in range(audit_log.QUEUE_EVENTS + 7):
        log.note(EVENT)
    go.set()
    log.close()
    assert sum(int(json.loads(line).get("lost", 0)) for line in lines(path)) == 7
    assert len(chain(path)) == audit_log.QUEUE_EVENTS + 1


class FullDisk:
    """A file that takes nothing."""

    def tell(self) -> int:
        return 0

    def write(self, line: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left")


def test_what_a_full_disk_did_not_take_is_counted_and_the_chain_goes_on(path: Path) -> None:
    log = AuditLog(path, 1 << 20, lambda: 1.5)
    kept, log._file = log._file, cast("BinaryIO", FullDisk())
    log.note(EVENT)
    assert eventually(lambda: log._lost == 1)
    log._file = kept
    log.note(EVENT)
    log.note(EVENT)
    log.close()
    assert [json.loads(line).get("lost") for line in lines(path)] == [1, None]
    assert len(chain(path)) == 2
