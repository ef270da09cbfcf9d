"""What `kvstore doctor` says of the certificates that a configuration names: when each ends."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvstore.cli.finding import Finding, State
from kvstore.server.settings.settings import Settings

EXPIRES_SOON = timedelta(days=14)

OWN = {"tls_cert": "certificate", "redis_tls_cert": "certificate for Redis"}
"""Settings of certificates that are shown to others, and what they are called."""

AUTHORITIES = {
    "tls_client_ca": "authority of clients",
    "peer_ca": "authority of peers",
    "redis_tls_ca": "authority of Redis",
}
"""Settings of those that others are believed by: one that is valid will do of several."""


def check_certificates(config: Settings) -> Iterator[Finding]:
    """How long each certificate that the settings name is valid."""
    for setting, name in (OWN | AUTHORITIES).items():
        path = getattr(config, setting)
        if path is not None:
            yield _finding(name, setting, path)


def _finding(name: str, setting: str, path: Path) -> Finding:
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = f"give --{setting.replace('_', '-')} a PEM file that can be read"
        return Finding(name, "fail", f"{path}: {error}", fix)
    best = found[0]
    if setting in AUTHORITIES:
        best = max(found, key=lambda one: one.not_valid_after_utc)
    now = datetime.now(UTC)
    if best.not_valid_before_utc > now:
        begins = best.not_valid_before_utc.isoformat(" ", "minutes")
        fix = "set the clock, or get it anew: nobody takes it before that"
        return Finding(name, "fail", f"valid from {begins}", fix)
    left = best.not_valid_after_utc - now
    state: State = "fail" if left < timedelta() else "warn" if left < EXPIRES_SOON else "ok"
    saw = f"expired {(-left).days} days ago" if state == "fail" else f"{left.days} days left"
    again = "start the server anew" if "redis" in setting else "the server reads it again by itself"
    return Finding(name, state, saw, "" if state == "ok" else f"replace the file; {again}")
