"""Encryption of what leaves memory, as the configuration asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.config import ServerConfig
from kvstore.server.trust.encryption_keys import parse_encryption_keys
from kvstore.server.watched_file import WatchedFile
from kvstore.tiers.base import Tier


def hiding(config: ServerConfig) -> Callable[[Tier], Tier]:
    """Return what encrypts a tier; without keys it leaves tiers as they are.

    The file of keys is looked at again with each frame. Raises InvalidRequestError for one that
    cannot be used.
    """
    path = config.encryption_keys
    if path is None:
        return lambda tier: tier
    from kvstore.tiers.at_rest import AtRestKeys
    from kvstore.tiers.encrypted import EncryptedTier

    file = WatchedFile((path,), _by_epoch)

    def now() -> Mapping[int, bytes]:
        file.refresh()
        return file.value

    keys = AtRestKeys(now, os.urandom)
    return lambda tier: EncryptedTier(tier, keys)


def _by_epoch(data: bytes) -> dict[int, bytes]:
    rows = parse_encryption_keys(data)
    if not rows:
        fix = "has no key; make one with kvstore keys new"
        raise InvalidRequestError("encryption_keys", len(data), fix)
    return {epoch: row.key for epoch, row in rows.items()}
