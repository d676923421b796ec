"""The membership of a streaming query in its group: the member, its lease, and the lanes of the owned partitions.

A lane is the record of one owned partition. `position` is the end of what the streaming engine was given of it, `done`
the end of what the engine has committed. The member's thread renews the lease, writes fenced checkpoints at `done`, and
releases a partition that is to move as soon as `done` has reached `position`, as it does for every consumer.

Alone in its group (the default), the query waits until it owns every partition, and refuses other members (K4). In a
shared group it takes the partitions that the assignment gives it.

On failure: a registry that cannot be reached is called again for as long as the lease lives. If the lease ends, the
member takes another one and claims the partitions again; the lanes are new ones then, and have to be placed anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from pxrs.errors import GroupActive, PartitionLost, RegistryUnavailable
from pxrs.events.recording import LOGGED_ONLY, Recorder
from pxrs.group.lane import Lane
from pxrs.group.member import GroupMember
from pxrs.group.records import Checkpoint, Home
from pxrs.group.timings import HANDOVER_TIMEOUT_DEFAULT, LEASE_TTL_DEFAULT, Timings
from pxrs.log.contract import Source
from pxrs.publishing.selection import FROM_START, Boundary
from pxrs.registry.contract import Registry
from pxrs.registry.identity import fingerprint
from pxrs.registry.outage import UNREACHABLE, ride_out, with_advice
from pxrs.wording import counted

_logger = logging.getLogger(__name__)
T = TypeVar("T")

SETTLE_S_MAX: Final = 30.0
"""How long, beyond a lease and a hand-over, a query waits for its partitions."""


@dataclass(frozen=True, slots=True)
class QueryOptions:
    """How a streaming query reads."""

    group: str
    starting: Boundary = FROM_START
    """Where the group begins if it has no checkpoint of any of the topics; "committed" stands for "earliest". A topic
    that is added later begins at its first offset (G6)."""
    fails_on_loss: bool = True
    """Whether it is an error (DataLost) that retention has removed messages that the query has not read."""
    is_shared: bool = False
    """Whether the group may have other members."""
    assignor: str = "sticky"
    lease_ttl: float = LEASE_TTL_DEFAULT
    handover_timeout: float = HANDOVER_TIMEOUT_DEFAULT
    only: Mapping[str, Collection[int]] | None = None
    """By topic, the partitions that are read; None for all. The query owns the other partitions too, so that nobody
    else reads them in this group, and leaves them unread."""


class Membership:
    """The member of one query. The query's thread calls it; the member's own thread calls the methods at the end."""

    def __init__(
        self,
        source: Source,
        registry: Registry,
        options: QueryOptions,
        start_of: Callable[[int, int], int],
        home: Callable[[], Home | None] | None,
        recorder: Recorder = LOGGED_ONLY,
    ) -> None:
        """Join the group. Raises GroupActive if the query must be alone and other members stay for two leases.

        start_of: the first offset of a partition without a checkpoint, given its number and the first offset that
                  retention has left. home, recorder: as `GroupMember` takes them."""
        self._source, self._registry, self._options = source, registry, options
        self._start_of, self._home, self._recorder = start_of, home, recorder
        self._changed = threading.Condition()
        self._lanes: dict[int, Lane] = {}
        self._unplaced: dict[int, Lane] = {}
        """Lanes of `_lanes` that `take_unplaced` has not returned yet: their positions are still the group's
        checkpoints, and not where the streaming engine goes on."""
        self.changes = 0
        """How often the member has reported a change of its lanes or its group."""
        timings = Timings(options.lease_ttl, options.handover_timeout, progress_timeout=None)
        self.lease_s = timings.lease_ttl
        """How long the lease lives without a renewal."""
        self.settle_s = timings.lease_ttl + timings.handover_timeout + SETTLE_S_MAX
        """How long `settle` may take before the query ends with an error."""
        self._registry_id = ""
        self.member = self._join(timings)

    def _join(self, timings: Timings) -> GroupMember:
        # A member that was killed is listed until its lease expires, so others are waited for that long.
        until = time.monotonic() + 2 * timings.lease_ttl
        while True:
            member = GroupMember(
                self._registry,
                self._options.group,
                self._source,
                self,
                start_of=self._start_of,
                name=None,
                timings=timings,
                assignor=self._options.assignor,
                is_alone=not self._options.is_shared,
                home=self._home,
                recorder=self._recorder,
            )
            with self._registry.watch(member.keys.members) as watch:
                try:
                    member.start()
                    return member
                except GroupActive:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise
                    watch.wait(left)

    @property
    def group(self) -> str:
        return self._options.group

    @property
    def incarnation(self) -> str | None:
        return self.member.incarnation

    @property
    def is_leased(self) -> bool:
        """Whether messages may be handed out now: the deadline of the lease has not passed (G8)."""
        return self._registry.clock.now() < self.member.deadline

    @property
    def registry_id(self) -> str:
        """The fingerprint of the registry, which holds no address. Read once."""
        if not self._registry_id:
            self._registry_id = self.ride_out(lambda: fingerprint(self._registry))
        return self._registry_id

    @property
    def lanes(self) -> dict[int, Lane]:
        """A copy: the owned partitions at this moment."""
        with self._changed:
            return dict(self._lanes)

    def holding(self, lane: Lane) -> tuple[Checkpoint, int] | None:
        """The checkpoint of an owned partition and the version of its owner key, which is the fence. None if the lane's
        partition is no longer owned."""
        return self.member.session.checkpoint(lane)

    # The registry.

    def ride_out(self, call: Callable[[], T]) -> T:
        """The result of a registry call that may be made twice. While the registry cannot be reached and the lease
        lives, the call is made again, for one lease's time at most.

        A checkpoint may be written twice: it expects its own version, which the member reads again after a lost
        reply."""
        try:
            return ride_out(call, self.lease_s, lambda: self.is_leased, UNREACHABLE)
        except UNREACHABLE as error:
            raise with_advice(
                error,
                f"group {self.group}: the registry could not be reached for the whole time of the lease, "
                f"{self.lease_s:g} s: {error}. Start the query again: it continues where it stopped",
            ) from error

    def commit(self) -> None:
        """Write the checkpoints of what is done. A lost partition or lease is only logged: the next batch is planned
        without it, and the fence of the sink's commit refuses a batch that has read of it."""
        if not self.member.has_due:
            return
        try:
            self.ride_out(self.member.commit)
        except PartitionLost as error:
            _logger.warning("%s", error)
        except UNREACHABLE as error:
            if self.is_leased:
                raise
            # The lanes end with the lease. Under the next lease they are placed by what the engine has finished.
            _logger.warning("group %s: the lease has run out: %s", self.group, error)

    def release_drained(self) -> None:
        """Wake the member's thread if a lane is stopping: the thread releases the lane once `done` has reached
        `position`."""
        if any(lane.is_stopping for lane in self.lanes.values()):
            self.member.wake()

    def close(self) -> None:
        """Write the last checkpoints, release every partition, and leave the group."""
        self.member.close()

    # Lanes.

    def settle(self, until: float) -> None:
        """Wait until the partitions are owned: alone, all of them; else those that the assignment gives this member.

        until: on the monotonic clock. After it, a query without a lease ends with RegistryUnavailable, and a query that
               must be alone with GroupActive; in a shared group, the query goes on with what it has."""
        while True:
            self.member.check()
            with self._changed:
                missing = self._source.partitions - len(self._lanes)
                has_them = self.member.is_settled if self._options.is_shared else not missing
                if has_them and self.is_leased:
                    return
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 0.5))
        if not self.is_leased:
            raise self.without_lease()
        if not self._options.is_shared:
            raise GroupActive(
                f"group {self.group}: other members still own {counted(missing, 'partition')} of {self._source.name} "
                f"after {self.settle_s:g} s; see `pxrs group describe`"
            )

    def without_lease(self) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"group {self.group}: the lease has run out, and no new lease was granted in {self.settle_s:g} s. Start "
            "the query again when the registry can be reached: it continues where it stopped"
        )

    def take_unplaced(self) -> list[tuple[Lane, Checkpoint]]:
        """The lanes that were assigned since the last call and are still owned, with their checkpoints. The caller sets
        their positions (`Lane.seek`)."""
        with self._changed:
            taken, self._unplaced = self._unplaced, {}
        held = [(lane, self.holding(lane)) for lane in taken.values()]
        return [(lane, found[0]) for lane, found in held if found is not None]

    def placed_lanes(self) -> dict[int, Lane] | None:
        """The lanes if all that should be owned are, all of them are placed, and the lease lives; else None."""
        with self._changed:  # under the lock: if the lease is lost meanwhile, all lanes are replaced
            is_placed, lanes = not self._unplaced, dict(self._lanes)
        has_all = self._options.is_shared or len(lanes) == self._source.partitions
        return lanes if is_placed and self.is_leased and has_all else None

    # Called by the member, on its own thread (`pxrs.group.events.MemberEvents`).

    def lanes_assigned(self, lanes: Sequence[Lane]) -> None:
        with self._changed:
            for lane in lanes:
                self._lanes[lane.partition] = self._unplaced[lane.partition] = lane
            self._notify()

    def lane_revoked(self, lane: Lane) -> None:
        self.group_changed()

    def lane_resumed(self, lane: Lane) -> None:
        self.group_changed()

    def _remove(self, lane: Lane) -> None:
        with self._changed:
            for lanes in (self._lanes, self._unplaced):
                if lanes.get(lane.partition) is lane:
                    del lanes[lane.partition]
            self._notify()

    lane_released = lane_lost = _remove

    def call_back(self) -> None:
        """A query has no callbacks of the user."""

    def group_changed(self) -> None:
        with self._changed:
            self._notify()

    def member_failed(self) -> None:
        self.group_changed()

    def _notify(self) -> None:
        """Called with `_changed` held."""
        self.changes += 1
        self._changed.notify_all()
