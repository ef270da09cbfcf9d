"""What `kvstore doctor` says of this machine's clock, by that of Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

from kvstore.cli.finding import Finding
from kvstore.proto.errors import KVStoreError
from kvstore.server.settings.settings import Settings
from kvstore.tiers.redis_client import RedisClient

MAX_SKEW_S = 2.0
"""Tokens and certificates are judged by each machine's own clock."""


def check_clock(config: Settings, wall_clock: Callable[[], float] = time.time) -> Iterator[Finding]:
    """How far this machine's clock is from that of the Redis that nodes share.

    A Redis that does not answer, or whose user may not ask (+time), says nothing here.
    """
    if config.redis_url is None:
        return
    try:
        url = config.redis_access(config.redis_url)
        link = RedisClient("redis", url, config.redis_timeout_ms, 1)
    except (KVStoreError, OSError, ValueError):
        return  # the check of Redis names it
    with closing(link):
        try:
            before_s = wall_clock()
            reply = link.run(b"time", [[b"TIME"]])[0]
            after_s = wall_clock()
        except KVStoreError:
            return
    match reply:
        case [bytes(seconds), bytes(micros)]:
            theirs_s = int(seconds) + int(micros) / 1e6
        case _:
            return
    skew_s = (before_s + after_s) / 2 - theirs_s
    is_off = abs(skew_s) - (after_s - before_s) / 2 > MAX_SKEW_S
    fix = "have both machines follow NTP: tokens and certificates end by a clock" if is_off else ""
    where = "ahead of" if skew_s > 0 else "behind"
    saw = f"{abs(skew_s):.1f} s {where} that of Redis"
    yield Finding("clock", "warn" if is_off else "ok", saw, fix)
