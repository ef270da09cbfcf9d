"""Opening the tiers that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.server.security.encryption_keys import parse_encryption_keys
from kvstore.server.security.watched_file import WatchedFile
from kvstore.server.settings.rules import GpuConfig
from kvstore.server.settings.settings import Settings
from kvstore.tiers.base import Tier
from kvstore.tiers.cpu import CpuTier

if TYPE_CHECKING:  # its file loads torch
    from kvstore.tiers.gpu import GpuTier


def open_tiers(config: Settings, closers: list[Callable[[], object]]) -> list[Tier]:
    """Return the configured tiers, fastest first; *closers* learns how to close them."""
    tiers: list[Tier] = []
    hidden = hiding(config)
    register = None
    if "gpu" in config.tiers:
        gpu = open_gpu_tier(config.gpu)
        tiers.append(gpu)
        closers.append(gpu.close)
        register = gpu.device.register
    tiers.append(CpuTier(config.cpu_size, config.cpu_slab_bytes, register))
    closers.append(tiers[-1].close)
    if "disk" in config.tiers:
        tiers.append(hidden(_open_disk_tier(config)))
        closers.append(tiers[-1].close)
    if "redis" in config.tiers:
        from kvstore.tiers.redis import RedisTier

        tier = RedisTier(
            config.redis_access(config.redis_url or ""),
            config.redis_size,
            timeout_ms=config.redis_timeout_ms,
            connections=config.redis_connections,
            prefix=config.redis_prefix,
        )
        tiers.append(hidden(tier))
        closers.append(tiers[-1].close)
    return tiers


def _open_disk_tier(config: Settings) -> Tier:
    from kvstore.tiers.disk import DiskOptions, DiskTier
    from kvstore.tiers.disk_files import DiskConfig

    options = DiskOptions(
        tuple(DiskConfig(folder.path, folder.capacity_bytes) for folder in config.disk.others),
        is_direct=config.disk_direct,
        largest_frame_bytes=config.max_frame_bytes,
    )
    return DiskTier(config.disk.path, config.disk.capacity_bytes, options=options)


def open_gpu_tier(config: GpuConfig) -> GpuTier:
    """Return the gpu tier on its CUDA device. Raises TierUnavailableError with the fix."""
    try:
        import torch

        from kvstore.proto.device import open_device
        from kvstore.tiers.gpu import GpuTier
    except ImportError as error:
        fix = "install kvstore-server[gpu], or start without gpu"
        raise TierUnavailableError("gpu", f"needs torch and cupy ({error}): {fix}") from None
    return GpuTier(config.capacity_bytes, open_device(torch.device("cuda", config.device)))


def hiding(config: Settings) -> Callable[[Tier], Tier]:
    """Return what encrypts a tier; without keys it leaves tiers as they are.

    The file of keys is looked at again with each frame. Raises InvalidRequestError for one that
    cannot be used.
    """
    path = config.encryption_keys
    if path is None:
        return lambda tier: tier
    from kvstore.tiers.encrypted import EncryptedTier, KeyRing

    file = WatchedFile((path,), _by_epoch)

    def now() -> Mapping[int, bytes]:
        file.refresh()
        return file.value

    keys = KeyRing(now, os.urandom)
    return lambda tier: EncryptedTier(tier, keys)


def _by_epoch(data: bytes) -> dict[int, bytes]:
    rows = parse_encryption_keys(data)
    if not rows:
        fix = "has no key; make one with kvstore keys new"
        raise InvalidRequestError("encryption_keys", len(data), fix)
    return {epoch: row.key for epoch, row in rows.items()}
