"""Puts a node's events together, from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvstore.server.security.watched_file import WatchedFile
from kvstore.server.settings.settings import Settings
from kvstore.server.store.store import Store
from kvstore.server.telemetry.events import EventLog

if TYPE_CHECKING:  # its file loads ZeroMQ
    from kvstore.server.web.event_publisher import EventPublisher

logger = structlog.get_logger(__name__)


class NodeEvents:
    """The log that the RPC reads, and the publisher; either may be None."""

    def __init__(
        self,
        config: Settings,
        store: Store,
        boot_id: int,
        closers: list[Callable[[], object]],
    ) -> None:
        """Events count from here on. Raises InvalidRequestError for what cannot be bound."""
        self.log: EventLog | None = None
        self.publisher: EventPublisher | None = None
        self.addresses: list[str] = []
        self._readers: WatchedFile[frozenset[bytes]] | None = None
        if not config.limits.events_kept:
            return
        slots = store.tiers.slots.values()
        tiers = [one.name for one in slots if not one.tier.shared]
        restarted = partial(store.counters.add, "event_restarts")
        held = store.catalog.queries.held_from
        self.log = EventLog(tiers, config.limits.events_kept, held, restarted)
        store.catalog.listeners.append(self.log)
        if (config.events, config.events_replay) != ("off", "off"):
            self._publish(config, store, boot_id, self.log)
            closers.append(self.close)

    def _publish(self, config: Settings, store: Store, boot_id: int, log: EventLog) -> None:
        from kvstore.server.web.event_keys import load_keys
        from kvstore.server.web.event_publisher import EventPublisher
        from kvstore.server.web.event_sockets import EventSockets, parse_readers

        path = config.events_readers
        if path is not None:
            self._readers = WatchedFile((path,), parse_readers, frozenset[bytes])
        readers = self._readers
        keys = None if readers is None else load_keys(config.events_keys)
        refused = partial(store.counters.add, "zmq_refused_connections")
        sockets = EventSockets(config.events, config.events_replay, keys, readers, refused)
        self.addresses = sockets.addresses
        self.publisher = EventPublisher(
            sockets, log, boot_id, store.counters, time.time, time.monotonic
        )
        public_key = keys.public.decode() if keys else ""
        logger.info("events are published", addresses=self.addresses, public_key=public_key)

    def tick(self) -> None:
        """Take in a file of readers that was replaced or deleted. Called a few times a second."""
        if self._readers is not None:
            self._readers.refresh()

    def is_alive(self) -> bool:
        """Whether the publisher's thread lives, if there is one."""
        return self.publisher is None or self.publisher.is_alive()

    def end(self) -> None:
        """Have readers of the RPC stop."""
        if self.log is not None:
            self.log.end()

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()
