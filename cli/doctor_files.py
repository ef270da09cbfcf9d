"""What `kvstore doctor` says of the files that trust rests on: who may read and change them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.cli.finding import Finding
from kvstore.server.settings.settings import Settings

SECRET = (
    "tls_key",
    "redis_tls_key",
    "redis_password_file",
    "peer_key",
    "encryption_keys",
    "secret_file",
)
"""Settings whose files let whoever reads them pass for the server, or read what it keeps."""

BELIEVED = ("auth_keys", "jwt_key", "tls_client_ca", "peer_ca", "redis_tls_ca", "events_readers")
"""Settings whose files let whoever changes them in."""


def check_files(config: Settings) -> Iterator[Finding]:
    """Whether anybody on this machine may read a secret, or change whom the server believes."""
    secret = {*SECRET, "jwt_key"} if config.jwt_algorithm == "HS256" else {*SECRET}
    for setting in (*SECRET, *BELIEVED):
        path: Path | None = getattr(config, setting)
        mode = 0 if path is None else path.stat().st_mode
        can = [
            what
            for what, bit in (("read", stat.S_IROTH), ("change", stat.S_IWOTH))
            if mode & bit and (what == "change" or setting in secret)
        ]
        if can:
            saw = f"anybody here may {' and '.join(can)} {path}"
            yield Finding(setting.replace("_", " "), "warn", saw, f"chmod o-rwx {path}")
