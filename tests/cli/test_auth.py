from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ServerMaker
from helpers.kvstore_command import Kvstore

from kvstore.cli import auth
from kvstore.server.security.key_files import (
    make_key,
    parse_encryption_keys,
    parse_keys,
    write_keys,
)

Run = Callable[..., str]


@pytest.fixture
def run(kvstore: Kvstore) -> Run:
    """Run the command; return what it printed, on either stream."""

    def run(*argv: object, status: int = 0) -> str:
        ran = kvstore(*argv)
        assert ran.status == status
        return ran.out + ran.err

    return run


@pytest.mark.parametrize("group", ["token", "keys"])
def test_a_list_of_a_file_that_is_not_there_names_it(tmp_path: Path, run: Run, group: str) -> None:
    assert "/none': No such file" in run(group, "list", tmp_path / "none", status=2)


def test_a_token_is_printed_once_listed_without_its_secret_and_revoked(
    tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "api-keys"
    token = run("token", "make", file, "--tenant", "acme", "--roles", "read").strip()
    assert file.stat().st_mode & 0o077 == 0
    found = parse_keys(file.read_bytes()).principal_of(token)
    assert found is not None
    assert (found.tenant, found.roles) == ("acme", frozenset({"read"}))
    listed = run("token", "list", file, "--json")
    (row,) = json.loads(listed)
    assert (row["tenant"], row["roles"]) == ("acme", "read")
    assert token[17:] not in listed
    assert "acme" in run("token", "list", file)
    out = tmp_path / "engine.token"
    assert run("token", "make", file, "--tenant", "zeta", "--out", out) == ""
    assert out.stat().st_mode & 0o077 == 0
    zeta = parse_keys(file.read_bytes()).principal_of(out.read_text().strip())
    assert zeta is not None
    assert zeta.tenant == "zeta"
    assert "exists" in run("token", "make", file, "--tenant", "b", "--out", out, status=2)
    assert len(parse_keys(file.read_bytes()).rows) == 2
    lost, other = tmp_path / "none" / "api-keys", tmp_path / "other.token"
    run("token", "make", lost, "--tenant", "b", "--out", other, status=2)
    assert not other.exists()
    assert "not in the file" in run("token", "revoke", file, "", status=2)
    run("token", "revoke", file, row["id"][:4])
    assert parse_keys(file.read_bytes()).principal_of(token) is None
    assert "not in the file" in run("token", "revoke", file, row["id"], status=2)
    assert "roles" in run("token", "make", file, "--tenant", "a", "--roles", "root", status=2)


def test_encryption_keys_are_made_listed_without_themselves_and_retired(
    tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "keys"
    assert "epoch 1" in run("keys", "new", file)
    assert "in use" in run("keys", "retire", file, 1, status=2)
    run("keys", "new", file)
    keys = parse_encryption_keys(file.read_bytes())
    listed = run("keys", "list", file, "--json")
    assert [row["epoch"] for row in json.loads(listed)] == ["1", "2"]
    assert not any(row.key.hex() in listed for row in keys.values())
    assert "--yes" in run("keys", "retire", file, 1, status=2), "nobody is there to ask"
    assert len(parse_encryption_keys(file.read_bytes())) == 2
    run("keys", "retire", file, 1, "--yes")
    assert list(parse_encryption_keys(file.read_bytes())) == [2]
    assert "not in the file" in run("keys", "retire", file, 9, "--yes", status=2)
    file.write_text("{}")
    assert "line 1" in run("keys", "list", file, status=2)


def test_commands_that_change_one_file_at_a_time_lose_no_row_and_bring_none_back(
    tmp_path: Path, run: Run
) -> None:
    tokens, keys = tmp_path / "api-keys", tmp_path / "keys"
    revoked = run("token", "make", tokens, "--tenant", "acme")[4:16]
    made = [("token", "make", tokens, "--tenant", "zeta")] * 4 + [("keys", "new", keys)] * 3
    python = (sys.executable, "-m", "kvstore.cli")
    ran = [
        subprocess.Popen([*python, *map(str, one)], stdout=subprocess.DEVNULL)
        for one in (*made, ("token", "revoke", tokens, revoked))
    ]
    assert [one.wait(60) for one in ran] == [0] * len(ran)
    rows = parse_keys(tokens.read_bytes()).rows.values()
    assert [row.tenant for row in rows] == ["zeta"] * 4
    assert list(parse_encryption_keys(keys.read_bytes())) == [1, 2, 3]


def test_a_folder_that_stays_locked_is_named_and_waited_for_no_longer(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_LOCK_S", 0.1)
    file = tmp_path / "keys"
    folder = os.open(tmp_path, os.O_RDONLY)  # as any user may who can list it
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert "lslocks" in run("token", "make", file, "--tenant", "acme", status=2)
    os.close(folder)
    run("token", "make", file, "--tenant", "acme")


def test_quotas_are_shown_and_changed_by_whoever_may_and_the_audit_log_holds(
    tmp_path: Path, make_server: ServerMaker, run: Run
) -> None:
    made = [
        make_key(*who, os.urandom, time.time()) for who in (("acme", ["read"]), ("ops", ["admin"]))
    ]
    write_keys(tmp_path / "api-keys", [row for _, row in made])
    engine, admin = (tmp_path / name for name in ("engine", "admin"))
    for file, (text, _) in zip((engine, admin), made, strict=True):
        file.write_text(text + "\n")
    log = tmp_path / "audit"
    server = make_server(
        *("--auth-keys", str(tmp_path / "api-keys"), "--audit-log", str(log)),
        *("--tenant-quotas", "acme=8MiB:1MiB"),
    )
    where = ("--address", server.address)
    shown = json.loads(run("--token-file", engine, "quota", "show", *where, "--json"))
    (acme,) = shown["tenants"]
    assert {tier["quota_bytes"] for tier in acme["tiers"]} == {8 << 20}
    change = ("quota", "set", "acme", *where, "--size", "4MiB", "--rate", "100", "--leases", "7")
    assert "lacks the role" in run("--token-file", engine, *change, status=3)
    told = run("--token-file", admin, *change)
    assert "4.0 MiB" in told
    run("--token-file", admin, "quota", "set", "acme", *where, "--size", "lots", status=2)
    assert "give a limit" in run("quota", "set", "acme", *where, "--tier", "cpu", status=2)
    assert "acme" in run("--token-file", admin, "quota", "show", "--all", *where)
    assert "token" in run("quota", "show", *where, status=3)
    run("--token-file", admin, "status", *where)
    shown = run("--token-file", engine, "status", *where)
    assert "need the role admin" in shown
    assert "0 sessions" not in shown
    assert "0 B" not in shown
    told = json.loads(run("--token-file", engine, "status", *where, "--json"))
    assert (told["state"], told["sessions"], told["leases"]) == ("serving", None, None)
    assert told["counters"] is None
    assert {(one["state"], one["used_bytes"]) for one in told["tiers"]} == {("serving", None)}
    for words in (("status", "--watch"), ("sessions",)):
        assert "role admin" in run("--token-file", engine, *words, *where, status=3)
    server.stop()
    held = run("audit", "verify", log)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row.get("who", "")[:4], row["rpc"], row["outcome"]) for row in rows] == [
        ("key:", "SetQuota", "PermissionDeniedError"),
        ("key:", "SetQuota", "OK"),
        ("", "Quota", "UnauthenticatedError"),
    ]
    run("audit", "verify", log, "--last", held.split()[-1])
    assert "cut off" in run("audit", "verify", log, "--last", "0" * 64, status=1)
    log.write_text(log.read_text().replace("SetQuota", "GetQuota"))
    assert "was changed" in run("audit", "verify", log, status=1)
    assert "no such file" in run("audit", "verify", tmp_path / "none", status=2)
