"""Puts a node's events together, from its settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog

from kvstore.server.api.event_calls import EventDesk
from kvstore.server.security.principal import Principal
from kvstore.server.security.watched_file import WatchedFile
from kvstore.server.settings.settings import Settings
from kvstore.server.store.store import Store
from kvstore.server.telemetry.events import EventLog

if TYPE_CHECKING:  # its file loads ZeroMQ
    from kvstore.server.web.event_publisher import EventPublisher

logger = structlog.get_logger(__name__)


class NodeEvents:
    """The desk that the RPC reads at, and the publisher; either may be None."""

    def __init__(
        self,
        config: Settings,
        store: Store,
        boot_id: int,
        holds: Callable[[Principal], bool],
        closers: list[Callable[[], object]],
    ) -> None:
        """Events count from here on; *holds* says whether a caller is still one.

        Raises InvalidRequestError for what cannot be bound.
        """
        self.desk: EventDesk | None = None
        self.publisher: EventPublisher | None = None
        self.addresses: list[str] = []
        self._readers: WatchedFile[frozenset[bytes]] | None = None
        if not config.events_kept:
            return
        slots = store.tiers.slots.values()
        log = EventLog([one.name for one in slots if not one.tier.shared], config.events_kept)
        store.catalog.listeners.append(log)
        restarted = partial(store.counters.add, "event_restarts")
        self.desk = EventDesk(log, store.catalog.queries.held_from, holds, restarted)
        if (config.events, config.events_replay) != ("off", "off"):
            self._publish(config, store, boot_id, self.desk)
            closers.append(self.close)

    def _publish(self, config: Settings, store: Store, boot_id: int, desk: EventDesk) -> None:
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
            sockets, desk, boot_id, store.counters, time.time, time.monotonic
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
        if self.desk is not None:
            self.desk.log.end()

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()
