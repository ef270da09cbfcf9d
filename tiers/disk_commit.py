"""Group commit of the disk tier: many seals and deletes, one sync and one transaction."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Lock, Thread

from kvstore.proto.errors import KVStoreError, TierFullError, TierUnavailableError
from kvstore.proto.types import ChunkKey
from kvstore.tiers.disk_folder import TIER
from kvstore.tiers.disk_index import DiskIndex, IndexRow, PackedRow, owner_key, pack_owner
from kvstore.tiers.extents import Extents

MAX_PENDING_SEALS = 256
"""A seal that finds this many before it commits them, durable or not."""
COMMIT_AGE_S = 0.2
"""How long a seal or delete that nobody waits for may stay uncommitted."""
MAX_SYNC_FAILURES = 3
"""Commits in a row whose sync failed, after which nothing is put there for a while."""
SYNC_RETRY_S = 1.0
"""How long that is."""


class Group:
    """Seals and deletes that become durable together; deletes come first.

    ``owners`` says of extents that changed hands whose they are now, None for deleted ones.
    """

    __slots__ = ("born_s", "deletes", "owners", "seals", "settled")

    def __init__(self) -> None:
        self.seals: dict[ChunkKey, Seal] = {}
        self.deletes: set[ChunkKey] = set()
        self.owners: dict[int, str | None] = {}
        self.born_s = 0.0
        self.settled = False

    def __bool__(self) -> bool:
        return bool(self.seals or self.deletes or self.owners)

    def owner_changes(self) -> tuple[list[bytes], list[PackedRow]]:
        """Return the keys to delete and the rows to write for ``owners``."""
        items = self.owners.items()
        gone = [owner_key(extent) for extent, tenant in items if tenant is None]
        return gone, [pack_owner(extent, tenant) for extent, tenant in items if tenant is not None]


class Seal:
    """A row on its way to the index; it counts as failed until its group is committed."""

    __slots__ = ("failure", "group", "packed", "row", "sync_failures")

    def __init__(self, row: IndexRow, packed: bytes, sync_failures: int, group: Group) -> None:
        self.row = row
        self.packed = packed
        self.sync_failures = sync_failures
        self.group = group
        self.failure: KVStoreError | None = TierUnavailableError(TIER, "the commit broke off")


class GroupCommit:
    """Gather seals and deletes; whoever needs one durable commits it for all that joined.

    Order: the deletes and rows of one group in one transaction, after a sync of every extent
    they touch, and one group after the other. So a region freed by a delete never has two
    rows in the index: the row of its next chunk comes with the delete or after it. Nor is a
    chunk's row ever there without its extent's owner.

    ``add``, ``drop``, ``note_owner``, ``pending`` and *forget* run under the owner's lock;
    everything else takes it, and no sync or transaction runs under it.
    """

    def __init__(
        self,
        extents: Extents,
        index: DiskIndex,
        lock: Lock,
        clock: Callable[[], float],
        forget: Callable[[IndexRow], None],
    ) -> None:
        """Commit to *index* what lies in *extents*; tell *forget* of each row that failed."""
        self.commits = 0
        self.lost_seals = 0
        self.index_full = False
        self.index_failure = ""
        self._sync_failure = ""
        self._failed_syncs = 0
        self._sync_retry_at_s = 0.0
        self._extents = extents
        self._index = index
        self._lock = lock
        self._clock = clock
        self._forget = forget
        self._settled = Condition(lock)
        self._work = Condition(lock)
        self._open = Group()
        self._busy: Group | None = None
        self._closed = False
        self._thread = Thread(target=self._commit_late, name="kvstore-disk-commit", daemon=True)
        self._thread.start()

    @property
    def write_failure(self) -> str:
        """Why nothing should be put now: it would not become durable. Empty while it would."""
        if self.index_failure:
            return self.index_failure
        is_off = self._failed_syncs >= MAX_SYNC_FAILURES and self._clock() < self._sync_retry_at_s
        return self._sync_failure if is_off else ""

    def add(self, row: IndexRow, packed: bytes, sync_failures: int) -> Seal:
        """Let *row*, reserved when its extent had *sync_failures*, join the open group."""
        group = self._join()
        seal = group.seals[row.info.key] = Seal(row, packed, sync_failures, group)
        return seal

    def drop(self, key: ChunkKey) -> None:
        """Delete the row of *key*, or the seal that was to write it."""
        seal = self._open.seals.pop(key, None)
        if seal is None:
            self._join().deletes.add(key)
        else:
            seal.failure = None

    def note_owner(self, extent: int, tenant: str | None) -> None:
        """Write down whose *extent* is, before or with the rows of what is put there."""
        self._join().owners[extent] = tenant

    def pending(self, key: ChunkKey) -> Seal | None:
        """Return the seal that is to write the row of *key*; None once it is written."""
        seal = self._open.seals.get(key)
        if seal is None and self._busy is not None and key not in self._open.deletes:
            seal = self._busy.seals.get(key)
        return seal

    def is_due(self) -> bool:
        """Whether the open group is so large that its newest member commits it."""
        return len(self._open.seals) >= MAX_PENDING_SEALS

    def settle(self, group: Group) -> None:
        """Return once *group* is committed or has failed; commit it if nobody else does."""
        with self._lock:
            while self._busy is not None and not group.settled:
                self._settled.wait()
            if group.settled or not group:
                return
            self._busy, self._open = group, Group()
        is_written = False
        try:
            is_written = self._commit(group)
        finally:
            with self._lock:
                self._conclude(group, is_written)
                group.settled = True
                self._busy = None
                self._settled.notify_all()

    def settle_all(self) -> KVStoreError | None:
        """Settle what has joined by now; return the failure of the first seal that has one."""
        with self._lock:
            groups = [group for group in (self._busy, self._open) if group is not None]
        for group in groups:
            self.settle(group)
        seals = (seal for group in groups for seal in group.seals.values())
        return next((seal.failure for seal in seals if seal.failure is not None), None)

    def close(self) -> None:
        """Stop the background thread and settle what is left."""
        with self._lock:
            self._closed = True
            self._work.notify()
        self._thread.join()
        self.settle_all()

    def _join(self) -> Group:
        if not self._open:
            self._open.born_s = self._clock()
            self._work.notify()
        return self._open

    def _commit(self, group: Group) -> bool:
        """Write *group* and mark its seals. False: nobody knows what of it was written."""
        good = self._sync(list(group.seals.values()))
        gone, owners = group.owner_changes()
        rows: list[PackedRow] = [(seal.row.info.key, seal.packed) for seal in good]
        try:
            done = self._index.commit({*group.deletes, *gone}, owners + rows)
        except TierUnavailableError as error:
            self.index_failure = str(error)
            for seal in good:
                seal.failure = TierUnavailableError(TIER, self.index_failure)
            return False
        if done >= len(owners):
            group.owners.clear()
        count = max(0, done - len(owners))
        for seal in good[:count]:
            seal.failure = None
        for seal in good[count:]:
            seal.failure = TierFullError(TIER, len(seal.packed), 0)
        self.index_failure = ""
        is_short = done < len(rows) + len(owners)
        self.index_full = is_short or (self.index_full and not group.deletes)
        self.commits += 1
        return True

    def _sync(self, seals: list[Seal]) -> list[Seal]:
        """Make the frames of *seals* durable; return those of which every byte is."""
        failures: dict[int, TierUnavailableError] = {}
        for extent in sorted({seal.row.extent for seal in seals}):
            try:
                self._extents.sync(extent)
            except TierUnavailableError as error:
                failures[extent] = error
        if seals:
            self._note_syncs([error for error in failures.values() if not error.is_partial])
        good: list[Seal] = []
        for seal in seals:
            extent = seal.row.extent
            # None: the extent was deleted, and so was the chunk, after this group closed.
            if self._extents.sync_failures(extent) in (None, seal.sync_failures):
                good.append(seal)
            else:
                lost = TierUnavailableError(TIER, "its bytes were lost when an earlier sync failed")
                seal.failure = failures.get(extent, lost)
        return good

    def _note_syncs(self, failures: list[TierUnavailableError]) -> None:
        """Take note of a commit's syncs; failures of one disk of several are not counted."""
        self._failed_syncs = self._failed_syncs + 1 if failures else 0
        for error in failures:
            self._sync_failure = str(error)
            self._sync_retry_at_s = self._clock() + SYNC_RETRY_S

    def _conclude(self, group: Group, is_written: bool) -> None:
        """Forget the seals that failed; what must still be deleted joins the next group."""
        for key, seal in group.seals.items():
            if seal.failure is None:
                continue
            self.lost_seals += 1
            if key not in self._open.deletes:
                self._forget(seal.row)
            if not is_written:
                self._join().deletes.add(key)
        if not is_written and group.deletes:
            self._join().deletes.update(group.deletes)
        if group.owners:
            self._join().owners = group.owners | self._open.owners

    def _commit_late(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (wait_s := self._wait_s()) != 0:
                    self._work.wait(wait_s)
                if self._closed:
                    return
                group = self._open
            self.settle(group)

    def _wait_s(self) -> float | None:
        """Seconds until the open group is due; None while it is empty."""
        if not self._open:
            return None
        return max(0.0, self._open.born_s + COMMIT_AGE_S - self._clock())
