"""`kvstore token`, `keys`, `quota` and `audit`: API keys, encryption keys, quotas, audit log."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from kvstore.cli import app
from kvstore.cli.chunks import EVERY_TENANT, MIN_DIGITS, only_one
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # keeps --help fast
    from kvstore.server.security.key_files import ApiKey, EncryptionKey

app.group("token", "Administer", "API keys in the --auth-keys file; servers reload it.")
app.group("keys", "Administer", "Encryption keys in the --encryption-keys file.")
app.group("quota", "Administer", "Tenants' usage and limits.")
app.group("audit", "Administer", "The audit log.")

KeyFile = Annotated[Path, Argument(metavar="FILE", help="Key file.")]
NewFile = Annotated[Path, Argument(metavar="FILE", help="Key file; created if missing.")]
_LOCK_S = 20.0
"""How long to wait for other commands that change the same files."""


def _shown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> app.Shown:
    data = [dict(zip(headings, row, strict=True)) for row in rows]
    return app.Shown(data, [app.Grid(headings, rows)])


def _day(made_s: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(made_s))


def _tokens(file: Path) -> list[ApiKey]:
    from kvstore.server.security.key_files import parse_keys, read_guarded

    return list(parse_keys(read_guarded(file)).rows.values())


def _encryption_keys(file: Path) -> list[EncryptionKey]:
    from kvstore.server.security.key_files import parse_encryption_keys, read_guarded

    return list(parse_encryption_keys(read_guarded(file)).values())


def _is_locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Wait until no other command changes *file*: else rows are lost, or revoked ones return.

    Not for ever: any user who can list the folder can lock it. Raises InvalidRequestError.
    """
    try:
        folder = os.open(file.absolute().parent, os.O_RDONLY)  # the file itself is replaced
    except OSError as error:
        raise InvalidRequestError("file", str(file), f"{error.strerror}; name another") from None
    try:
        ends_at = time.monotonic() + _LOCK_S
        with suppress(OSError):  # a file system without locks
            while not _is_locked(folder):
                if time.monotonic() > ends_at:
                    fix = "another process keeps its folder locked: end it; see lslocks"
                    raise InvalidRequestError("file", str(file), fix)
                time.sleep(0.05)
        yield
    finally:
        os.close(folder)


# --- token


@app.command("token make", exits="0 2", example="api-keys --tenant acme")
def token_make(
    file: NewFile,
    tenant: Annotated[str, Option(help="Tenant of the key.")],
    roles: Annotated[str, app.chosen("Roles", ("read", "write", "admin", "peer"))] = "read,write",
    out: Annotated[Path | None, app.path("Write the key to this new file, mode 0600.")] = None,
) -> None:
    """Create an API key and print it.

    Only its hash is stored, so it cannot be shown again.
    """
    from kvstore.server.security.key_files import make_key, write_keys

    text, row = make_key(tenant, [one for one in roles.split(",") if one], os.urandom, time.time())
    if out is None:
        with _alone(file):
            write_keys(file, [*_tokens(file), row] if file.exists() else [row])
        print(text)
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with _alone(file), os.fdopen(os.open(out, flags, 0o600), "w") as target:
        try:
            target.write(f"{text}\n")
            target.flush()
            os.fsync(target.fileno())
            write_keys(file, [*_tokens(file), row] if file.exists() else [row])
        except BaseException:
            out.unlink(missing_ok=True)
            raise


@app.command("token list", exits="0 2", example="api-keys")
def token_list(file: KeyFile) -> app.Shown:
    """Show the keys of a file: their ids, tenants and roles."""
    rows = [(r.id, r.tenant, ",".join(sorted(r.roles)), _day(r.made)) for r in _tokens(file)]
    return _shown(("id", "tenant", "roles", "made"), rows)


@app.command("token revoke", exits="0 2", example="api-keys 0123456789ab")
def token_revoke(
    file: KeyFile,
    key_id: Annotated[str, Argument(metavar="ID", help="Key id; a unique prefix is enough.")],
) -> None:
    """Remove a key from a file; its sessions end within a second."""
    from kvstore.server.security.key_files import write_keys

    with _alone(file):
        rows = _tokens(file)
        ids = [row.id for row in rows if row.id.startswith(key_id)]
        found = only_one("id", key_id, ids) if len(key_id) >= MIN_DIGITS else None
        if found is None:
            raise InvalidRequestError("id", key_id, "not in the file; see kvstore token list")
        write_keys(file, [row for row in rows if row.id != found])
    print(f"revoked {found}")


# --- keys


@app.command("keys new", exits="0 2", example="encryption-keys")
def keys_new(file: NewFile) -> None:
    """Create a key of the next epoch; new data is encrypted with it."""
    from kvstore.server.security.key_files import next_key, write_keys

    with _alone(file):
        rows = _encryption_keys(file) if file.exists() else []
        row = next_key(rows, os.urandom, time.time())
        write_keys(file, [*rows, row])
    print(f"created the key of epoch {row.epoch}; new data is encrypted with it")


@app.command("keys list", exits="0 2", example="encryption-keys")
def keys_list(file: KeyFile) -> app.Shown:
    """Show the epochs of a file, and the fingerprints of their keys."""
    import hashlib

    rows = [
        (str(row.epoch), hashlib.sha256(row.key).hexdigest()[:16], _day(row.made))
        for row in _encryption_keys(file)
    ]
    return _shown(("epoch", "fingerprint", "made"), rows)


@app.command("keys retire", exits="0 1 2", example="encryption-keys 1 --yes")
def keys_retire(
    file: KeyFile,
    epoch: Annotated[int, Argument(metavar="EPOCH", help="Epoch, as in keys list.")],
    yes: app.Yes = False,
) -> None:
    """Delete a key permanently: data encrypted with it is lost."""
    from kvstore.server.security.key_files import write_keys

    _without(file, epoch)
    if not yes:
        app.confirm(f"Data encrypted with the key of epoch {epoch} becomes unreadable. Continue?")
    with _alone(file):
        write_keys(file, _without(file, epoch))
    print(f"deleted the key of epoch {epoch}")


def _without(file: Path, epoch: int) -> list[EncryptionKey]:
    rows = _encryption_keys(file)
    left = [row for row in rows if row.epoch != epoch]
    if len(left) == len(rows):
        raise InvalidRequestError("epoch", epoch, "not in the file; see kvstore keys list")
    if not left or epoch == max(row.epoch for row in rows):
        raise InvalidRequestError("epoch", epoch, "in use; run kvstore keys new first")
    return left


# --- quota


@app.command("quota show", example="--all --json")
def quota_show(
    address: str,
    tenant: Annotated[str, Argument(help="Tenant; default: your own.")] = "",
    everything: Annotated[bool, Option("--all", help="Every tenant; for admins.")] = False,
) -> app.Shown:
    """Show a tenant's usage of each tier, and its limits."""
    return _quotas(app.call(address, "Quota", tenant=EVERY_TENANT if everything else tenant))


@app.command("quota set", example="acme --rate 500")
def quota_set(  # noqa: PLR0913 - each is an option
    address: str,
    tenant: Annotated[str, Argument(help="Tenant whose limits change.")],
    quota: Annotated[int | None, app.size("Capacity of each tier.", "--size")] = None,
    guaranteed: Annotated[int | None, app.size("Guaranteed minimum of each tier.")] = None,
    tier: Annotated[app.TierName | None, Option(help="Limits of this tier only.")] = None,
    chunks: Annotated[int | None, Option(min=0, help="Chunks on each tier; 0: no limit.")] = None,
    rate: Annotated[int | None, Option(min=0, help="Requests a second.")] = None,
    leases: Annotated[int | None, Option(min=0, help="Leases at once.")] = None,
) -> app.Shown:
    """Change a tenant's limits until the server restarts; needs the role admin."""
    given = {
        "quota_bytes": quota, "guaranteed_bytes": guaranteed, "chunks": chunks,
        "requests_per_s": rate, "leases": leases, "tier": tier,
    }  # fmt: skip
    fields = {name: value for name, value in given.items() if value is not None}
    if not fields.keys() - {"tier"}:
        fix = "give a limit: --size, --guaranteed, --chunks, --rate or --leases"
        raise InvalidRequestError("quota", tenant, fix)
    return _quotas(app.call(address, "SetQuota", tenant=tenant, **fields))


def _quotas(reply: Any) -> app.Shown:
    limits, tiers = [], []
    for one in reply.tenants:
        most = (limit or "-" for limit in (one.leases, one.requests_per_s, one.chunks))
        limits.append((one.tenant, one.used_leases, *most))
        for tier in one.tiers:
            quota = app.readable_size(tier.quota_bytes) if tier.quota_bytes else "-"
            used, guaranteed = map(app.readable_size, (tier.used_bytes, tier.guaranteed_bytes))
            tiers.append((one.tenant, tier.tier, used, quota, guaranteed, tier.used_chunks))
    text = [app.Grid(("tenant", "leases", "of", "requests/s", "chunks a tier"), limits)]
    if tiers:
        text.append(app.Grid(("tenant", "tier", "used", "of", "guaranteed", "chunks"), tiers))
    return app.Shown(app.as_dict(reply), text)


# --- audit


@app.command("audit verify", exits="0 1 2", example="audit.log")
def audit_verify(
    file: Annotated[Path, Argument(metavar="FILE", help="The --audit-log file.")],
    last: Annotated[str | None, Option(metavar="HASH", help="A hash that is in the log.")] = None,
) -> None:
    """Verify the hash chain of a log through all its files; exits with 1 if it is broken.

    Prints the number of records and the last one's hash. Keep the hash elsewhere to detect a
    truncated log later, with --last.
    """
    from kvstore.server.security.audit_log import audit_files, read_chain

    files = audit_files(file)
    if not files:
        raise InvalidRequestError("file", str(file), "no such file")
    count, digest, is_found = 0, "", last is None
    try:
        for _, digest in read_chain(files):
            count += 1
            is_found = is_found or digest == last
    except InvalidRequestError as error:
        app.fail(error, app.EXIT_NOT_HELD)
    if not is_found:
        app.fail(f"{last} is not in the log: its end was cut off", app.EXIT_NOT_HELD)
    print(f"{count} records verified; the last hash is {digest}")
