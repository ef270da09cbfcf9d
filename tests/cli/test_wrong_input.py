"""Each wrong setting of the page of operations: which command names it, and says how to mend it.

What concerns Redis is in test_doctor_redis, the clock in test_doctor_clock, the chart in
tests/chart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.credentials import Authority

from kvstore.cli.__main__ import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(argv)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


@pytest.fixture
def found(run: Run, tmp_path: Path) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """What the doctor says of a server with such flags: its exit status, and rows by check."""

    def found(*flags: str) -> tuple[int, dict[str, dict[str, str]]]:
        sizes = ("--tiers", "cpu", "--cpu", "16MiB", "--address", "127.0.0.1:1")
        status, out, _ = run("doctor", "--json", *sizes, *flags)
        return status, {row["check"]: row for row in json.loads(out)["checks"]}

    return found


@pytest.mark.parametrize("command", [("config", "validate"), ("doctor",)])
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--wirte", "evict"], ["--wirte", "--write"]),
        (["--policy", "hit_densit"], ["policy", "hit_densit'", "one of lru", "hit_density"]),
        (["--policy", "adaptive"], ["policy", "use hit_density, which replaces adaptive"]),
        (["--adapt-tenants", "acme"], ["--adapt-tenants", "use --policy hit_density"]),
        (["--cpu", "8Gigs"], ["cpu_size", "8Gigs"]),
        (["--cpu", "1KiB"], ["cpu_size", "1"]),
        (["--auth-keys", "/no/such/keys"], ["auth_keys", "/no/such/keys", "can read"]),
        (["--secret-file", "/no/such/secret"], ["secret_file", "/no/such/secret", "can read"]),
        (["--tiers", "cpu,redis"], ["redis"]),
    ],
)
def test_settings_are_refused_with_their_name_and_what_to_give(
    run: Run, command: tuple[str, ...], argv: list[str], words: list[str]
) -> None:
    status, out, err = run(*command, *argv)
    assert (status, out) == (2, "")
    assert [word for word in words if word not in err] == []


def test_a_misspelt_key_of_the_file_is_refused_and_the_right_one_named(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "kvstore.yaml"
    path.write_text("write_budgte: 0\n")
    status, _, err = run("config", "validate", "--config", str(path))
    assert status == 2
    assert "write_budgte" in err
    assert "did you mean write_budget?" in err


def test_a_disk_that_is_too_small_is_told_with_the_size_that_fits(
    found: Callable[..., tuple[int, dict[str, dict[str, str]]]], tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    status, rows = found("--tiers", "cpu,disk", "--disk", f"900TiB:{folder}")
    row = rows[f"disk {folder}"]
    assert (status, row["state"]) == (1, "fail")
    assert "give at most" in row["fix"]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("days", "state", "words"),
    [
        (-1.5, "fail", "expired 1 days ago"),
        (3.5, "warn", "3 days left"),
        (90, "ok", "89 days left"),
    ],
)
def test_the_end_of_a_certificate_is_told_before_and_after(
    found: Callable[..., tuple[int, dict[str, dict[str, str]]]],
    tmp_path: Path,
    days: float,
    state: str,
    words: str,
) -> None:
    cert, key = Authority(tmp_path).issue("server", days=days)
    status, rows = found("--tls-cert", str(cert), "--tls-key", str(key))
    row = rows["certificate"]
    assert (status, row["state"], row["saw"]) == (int(state == "fail"), state, words)
    assert bool(row["fix"]) == (state != "ok")


def test_authorities_are_looked_at_too(
    found: Callable[..., tuple[int, dict[str, dict[str, str]]]], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", days=90)
    late, _ = authority.issue("late", days=-1)
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    both = tmp_path / "both.pem"
    both.write_bytes(late.read_bytes() + cert.read_bytes())
    status, rows = found(
        *("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(both)),
        *("--peers", "127.0.0.1:1", "--peer-ca", str(late)),
        *("--redis", "rediss://127.0.0.1:1/0", "--redis-tls-ca", str(empty)),
    )
    assert status == 1
    assert rows["authority of clients"]["state"] == "ok", "one that is valid will do"
    assert rows["authority of peers"]["saw"] == "expired 1 days ago"
    assert "by itself" in rows["authority of peers"]["fix"]
    assert rows["authority of Redis"]["state"] == "fail"
    assert "--redis-tls-ca" in rows["authority of Redis"]["fix"]
