"""Claims, opens and releases the partitions of this broker (P5).

One thread compares this broker's partitions with the records in the registry after each change of brokers, topics or
owners. The records may be out of date, so every change is a commit that expects what the decision relied on:

    what the thread finds                                        what it does
    an owned partition is not open, or its writer has stopped    open it
    the owner record of an owned partition has another claim     give the partition up
    the owner of a partition is not alive                        claim it if this broker has the least load, or after
                                                                 CLAIM_S in any case
    this broker has more partitions than another (`balance`)     release one: close its ledger, then free the claim
    the topic of an owned partition was deleted                  give the partition up, then free the claim
    this broker has lost its lease                               give all partitions up, join as a new incarnation

A claim is a commit that names the broker's lease, and expects the owner record and the topic's record as they were read
and the absence of the last owner's broker record. So only one of two brokers gets a partition, a broker with an expired
lease gets none, a deleted topic gets no owner, and no partition is taken from a broker that may still answer reads
(C4).

A partition is released in this order: the broker closes the ledger, so that the next owner need not recover it; it
stops serving the partition; it frees the owner record by a commit that expects the claim. If it freed the record first,
it could answer a read from its memory while the next owner has already confirmed more entries.

A partition that cannot be opened is tried again (`tries`). After TROUBLE_S it is published as one that this broker owns
and does not serve, with the reason (`troubles`), for `pxrs cluster status`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from typing import Final, NamedTuple

from pxrs.cluster import records
from pxrs.cluster.broker.balance import to_release
from pxrs.cluster.broker.beginning import Claim
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.opening import open_partition
from pxrs.cluster.broker.partition import OwnedPartition
from pxrs.cluster.broker.pools import ToldPool
from pxrs.cluster.broker.tries import RETRY_S_MAX, UNHEARD_S_MAX, Tries
from pxrs.cluster.broker.view import Place, Seen
from pxrs.cluster.placement import Candidate, choose, least_loaded
from pxrs.cluster.records import NOBODY, OwnerRecord, TopicRecord
from pxrs.cluster.troubles import KINDS, Troubles, Unserved, reason_of, troubles_key
from pxrs.errors import (
    Closed,
    Conflict,
    LeaseExpired,
    OutcomeUnknown,
    PartitionMoved,
    PxrsError,
    ReadFailed,
    RegistryError,
    TopicDeleted,
)
from pxrs.limited_log import LimitedLog
from pxrs.metrics.instruments import BROKER_OPENING, BROKER_PARTITIONS, BROKER_UNSERVED
from pxrs.registry.contract import ABSENT
from pxrs.waiting import Subscribers, start_thread

_logger = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Interval at which the thread compares although nothing has changed."""
PAUSE_S_MIN: Final = 0.02
"""The shortest such interval, when a partition is due to be tried again."""
CLAIM_S: Final = 2.0
"""How long a partition may have no owner before any broker claims it, not only the least loaded one."""
TROUBLE_S: Final = 2.0
"""How long a partition must not have been served to be published. Most openings after a fail-over are faster."""
TELL_S: Final = 1.0
"""The troubles are written to the registry at most once in so many seconds."""

_log: Final = LimitedLog(_logger, records_max=1)


class _Stuck(NamedTuple):
    """Since when a partition is not served."""

    at: float
    """Monotonic."""
    wall: float


class Ownership:
    """Runs from `start` to `close`. Threads share it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._owned: dict[Place, OwnedPartition] = {}
        self._opening: dict[OwnedPartition, Tries] = {}
        """The tries to open each partition that is not open. The key is the object, not the place, so that the next
        incarnation does not wait for an opening of the last one."""
        self._grounds: tuple[Seen, Hashable] = (Seen(), None)
        """What was last read from the registry, and `_grounds` of it."""
        self._stuck: dict[OwnedPartition, _Stuck] = {}
        """The partitions that were not served at the last look. Written by the thread only."""
        self._unserved: list[Unserved] = []
        """Those of them that have not been served for TROUBLE_S. The thread replaces the list."""
        self._told: tuple[str, Troubles | None] = ("", Troubles())
        """The troubles that were published last, and under which incarnation."""
        self._told_at = 0.0
        self._orphans: dict[Place, float] = {}
        """By partition: when this broker first saw that it has no live owner (monotonic)."""
        self._releasing: Place | None = None
        """The partition that is being released to another broker; this broker does not claim it until that is done."""
        self._subscribers: dict[str, Subscribers] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._is_cut_off = False
        """Set while this broker stops if the registry does not answer, so that further releases are not tried."""
        self._pool = ToldPool(broker.settings.openings_max, "pxrs-opening")
        self._subscription = broker.view.subscribe(self._wake.set)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to claim partitions. The broker has joined the cluster (`Membership.join`)."""
        self._broker.news.record("broker.joined", **self._broker.membership.named())
        BROKER_PARTITIONS.watch(self, _states)
        BROKER_UNSERVED.watch(self, _kinds)
        self._thread = start_thread(self._run, "pxrs-ownership")

    def owned(self, topic_id: str, partition: int) -> OwnedPartition | None:
        return self._owned.get((topic_id, partition))

    def partitions(self) -> dict[Place, OwnedPartition]:
        with self._lock:
            return dict(self._owned)

    def subscribers(self, topic_id: str) -> Subscribers:
        """The subscribers to changes of a topic's partitions at this broker."""
        with self._lock:
            return self._subscribers.setdefault(topic_id, Subscribers())

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            if self._is_closed:
                return
            try:
                if self._broker.membership.join():
                    self._give_up_all(PartitionMoved("the broker has lost its lease"))
                    self._broker.news.record("broker.joined", **self._broker.membership.named())
                    self._broker.view.refresh()
                self._look(self._broker.view.seen)
                self._broker.membership.tell_load(float(len(self._owned)))
                self._tell_troubles(self._broker.view.seen)
            except Closed:
                return
            except PxrsError as error:
                _logger.warning("the ownership of partitions could not be updated, retrying soon: %s", error)
                self._wake.wait(LOOK_S)
            except Exception:
                _logger.exception("the ownership of partitions could not be updated, retrying soon")
                self._wake.wait(LOOK_S)

    def _pause_s(self) -> float:
        """How long the thread may sleep: until the next look, or until a partition may be tried again."""
        now = time.monotonic()
        with self._lock:
            waits = [tries.wait_s(now) for partition, tries in self._opening.items() if partition.is_stuck]
        return max(PAUSE_S_MIN, min((LOOK_S, *waits)))

    def _look(self, seen: Seen) -> None:
        me = self._broker.membership.incarnation
        topics = {record.topic.id: (record, version) for record, version in seen.topics.values()}
        for place, partition in self.partitions().items():
            claim = seen.owners.get(place)
            if place[0] not in topics:
                self._give_up(place, TopicDeleted(partition.topic.topic.name, place[0], is_made_again=False))
                continue
            partition.topic = topics[place[0]][0]  # the topic's settings may have changed
            if place == self._releasing:
                continue
            if claim is not None and claim[0].broker != me and claim[0].epoch >= partition.epoch:
                self._give_up(place, PartitionMoved(f"{partition.name}: another broker has claimed the partition"))
            elif partition.is_stuck:
                self._begin(place, partition)
        for place, (owner, version) in seen.owners.items():
            if owner.broker == me and place[0] not in topics:  # given up: `ClusterLog.delete_topic` waits for that
                self._broker.crew.submit(self._release_deleted, place, owner, version)
        load = Counter(owner.broker for place, (owner, _) in seen.owners.items() if place[0] in topics)
        takers = {each for each, found in seen.brokers.items() if not found.is_leaving} | {me}
        candidates = {each: Candidate(each, float(load[each])) for each in sorted(takers)}
        for topic_id, (topic, version) in topics.items():
            for number in range(topic.topic.partitions):
                self._consider((topic_id, number), topic, version, seen, candidates)
        self._rebalance(seen, takers, topics.values())
        self._forget_deleted(topics.keys())

    def _forget_deleted(self, topics: Collection[str]) -> None:
        """topics: the ids of those that are there."""
        self._orphans = {place: since for place, since in self._orphans.items() if place[0] in topics}
        with self._lock:
            gone = [each for each, waiting in self._subscribers.items() if each not in topics and not len(waiting)]
            for topic_id in gone:
                del self._subscribers[topic_id]

    def _release_deleted(self, place: Place, owner: OwnerRecord, version: int) -> None:
        """On a thread of the crew. If it fails, the next look tries again."""
        key = records.owner_key(*place)
        try:
            self._broker.registry.commit({key: version}, {key: owner.released().dump()})
        except Conflict:
            return  # a ledger was begun meanwhile, or another thread was first
        except PxrsError as error:
            _logger.info("partition %d of the deleted topic %s was not released: %s", place[1], place[0], error)

    def _rebalance(self, seen: Seen, takers: set[str], topics: Iterable[tuple[TopicRecord, int]]) -> None:
        """Begin to release a partition if another broker has fewer (`balance`)."""
        owners = {
            (topic.topic.id, number): seen.owners.get((topic.topic.id, number), (OwnerRecord(), 0))[0].broker
            for topic, _ in topics
            for number in range(topic.topic.partitions)
        }
        mine = self.partitions()
        serving = [place for place, partition in mine.items() if partition.why_not is None]
        place = to_release(self._broker.membership.incarnation, takers, owners, serving)
        with self._lock:
            if place is None or self._releasing is not None or self._is_closed:
                return
            self._releasing = place
        self._pool.submit(self._hand_over, place, mine[place])

    def _hand_over(self, place: Place, partition: OwnedPartition) -> None:
        try:
            self._release(place, partition, "another broker has fewer partitions")
            self._broker.view.refresh()  # so that the next decision to release sees this one
        except PxrsError as error:
            # If the owner record still names this broker, `_look` claims the partition again.
            _logger.warning("partition %s could not be released: %s", partition.name, error)
        except Exception:
            _logger.exception("partition %s could not be released", partition.name)
        finally:
            self._releasing = None
            self._wake.set()

    def _release(self, place: Place, partition: OwnedPartition, why: str) -> None:
        """Close the ledger, stop serving, and free the claim. Raises what the registry raises."""
        began = time.monotonic()
        partition.close_ledger()
        self._give_up(place, PartitionMoved(f"{partition.name}: {why}"))
        key, claim = records.owner_key(*place), partition.claim
        try:
            self._broker.registry.commit({key: claim.version}, {key: claim.owner.released().dump()})
        except Conflict:
            return  # another broker has claimed it, or the topic was deleted
        _logger.info("released partition %s after %.3f s", partition.name, time.monotonic() - began)

    def _consider(
        self, place: Place, topic: TopicRecord, version: int, seen: Seen, candidates: dict[str, Candidate]
    ) -> None:
        """Claim a partition if it has no live owner and this broker is the one that should claim it."""
        owner, owner_version = seen.owners.get(place, (OwnerRecord(), ABSENT))
        me = self._broker.membership.incarnation
        if place in self._owned or owner.is_deleted or place == self._releasing:
            return
        if owner.broker in seen.brokers and owner.broker != me:
            self._orphans.pop(place, None)
            return
        since = self._orphans.setdefault(place, time.monotonic())
        (chosen,) = choose(least_loaded, list(candidates.values()), 1, place[1]) or [me]
        candidates[chosen] = candidates[chosen]._replace(load=candidates[chosen].load + 1)
        if chosen == me or time.monotonic() - since > CLAIM_S:
            self._claim(place, topic, version, owner, owner_version)

    def _claim(self, place: Place, topic: TopicRecord, version: int, owner: OwnerRecord, owner_version: int) -> None:
        membership = self._broker.membership
        lease = membership.lease
        if lease is None:
            return
        key = records.owner_key(*place)
        claimed = owner.claimed(membership.incarnation, membership.address)
        expected = {key: owner_version, records.topic_key(topic.topic.name): version}
        if owner.broker not in (NOBODY, membership.incarnation):
            expected[records.broker_key(owner.broker)] = ABSENT  # while it is alive, it may answer reads (C4)
        try:
            versions = self._broker.registry.commit(expected, {key: claimed.dump()}, lease=lease)
        except (Conflict, LeaseExpired, OutcomeUnknown):
            # `_look` finds out from the records: if the claim succeeded, the owner record names this incarnation.
            self._broker.view.look_again()
            return
        self._orphans.pop(place, None)
        self._add(place, topic, claimed, versions[key])

    def _add(self, place: Place, topic: TopicRecord, owner: OwnerRecord, version: int) -> None:
        partition = OwnedPartition(self._broker, topic, place[1], Claim(owner, version), self.subscribers(place[0]))
        with self._lock:
            self._owned[place] = partition
        _logger.info("claimed partition %s, epoch %d", partition.name, owner.epoch)
        self._begin(place, partition)

    def _begin(self, place: Place, partition: OwnedPartition) -> None:
        """Open a partition on a thread of the pool, unless one is opening it or the next try is later."""
        seen = self._broker.view.seen
        if self._grounds[0] is not seen:
            self._grounds = seen, _grounds(seen)
        now, grounds = time.monotonic(), self._grounds[1]
        with self._lock:
            if self._is_closed or self._owned.get(place) is not partition:  # it was given up meanwhile
                return
            tries = self._opening.setdefault(partition, Tries())
            if not tries.may_begin(now, grounds):
                return
            tries.begin(now, grounds)
        self._pool.submit(self._open, place, partition)

    def _open(self, place: Place, partition: OwnedPartition) -> None:
        failure: Exception | None = None
        began = time.monotonic()
        try:
            has_recovered = open_partition(self._broker, partition, lambda: self._pool.is_crowded)
            self._tell_opened(place, partition, time.monotonic() - began, has_recovered)
        except Exception as error:  # noqa: BLE001 - the next try finds out whether it lasts
            failure = error
            partition.tell_why(reason_of(error))
        finally:
            BROKER_OPENING.of("failed" if failure else "serving").observe(time.monotonic() - began)
            self._end_try(partition, failure)

    def _end_try(self, partition: OwnedPartition, failure: Exception | None) -> None:
        with self._lock:
            tries = self._opening.get(partition)
            if tries is None:  # it was given up
                return
            if failure is None:
                del self._opening[partition]
                return
            pause_s_max = UNHEARD_S_MAX if isinstance(failure, ReadFailed) else RETRY_S_MAX
            pause_s = tries.failed(time.monotonic(), pause_s_max, starts_anew=isinstance(failure, RegistryError))
        _log.log(
            (partition.name, type(failure), f"{failure}"),
            logging.WARNING if isinstance(failure, PxrsError) else logging.ERROR,
            "partition %s could not be opened, retrying in %.3g s: %s",
            partition.name,
            pause_s,
            f"{failure}" or repr(failure),
            exc_info=None if isinstance(failure, PxrsError) else failure,
        )
        self._wake.set()  # so that the thread sleeps no longer than until the next try

    def _tell_opened(self, place: Place, partition: OwnedPartition, seconds: float, recovered: bool) -> None:
        _logger.info("serving partition %s after %.3f s", partition.name, seconds)
        self._broker.news.record(
            "partition.opened",
            **self._broker.membership.named(),
            topic=partition.topic.topic.name,
            topic_id=place[0],
            partition=place[1],
            epoch=partition.epoch,
            seconds=round(seconds, 3),
            recovered=recovered,
        )

    def _give_up(self, place: Place, why: PxrsError) -> None:
        with self._lock:
            partition = self._owned.pop(place, None)
            if partition is not None:
                self._opening.pop(partition, None)
        if partition is not None:
            _logger.info("gave up partition %s: %s", partition.name, why)
            partition.give_up(why)

    def _give_up_all(self, why: PxrsError) -> None:
        for place in self.partitions():
            self._give_up(place, why)

    # What is not served.

    def _tell_troubles(self, seen: Seen) -> None:
        """Publish the partitions that are not served, if that has changed. Raises what the registry raises."""
        self._note_unserved()
        membership = self._broker.membership
        lease, incarnation, now = membership.lease, membership.incarnation, time.monotonic()
        topics = {record.topic.id for record, _ in seen.topics.values()}
        failed = [each for each in self._broker.placements.failed if each.topic_id in topics]
        troubles = Troubles.of(self._unserved, failed)
        # The key of an old incarnation is gone.
        told = self._told[1] if self._told[0] == incarnation else Troubles()
        if troubles == told or lease is None or now - self._told_at < TELL_S:
            return
        key = troubles_key(incarnation)
        self._told_at = now
        # If the outcome of the commit is unknown, the next one is made whatever is to be told then.
        self._told = incarnation, None
        try:
            if troubles:
                self._broker.registry.commit(ephemeral={key: troubles.dump()}, lease=lease)
            else:
                self._broker.registry.commit(delete=[key], lease=lease)
        except LeaseExpired:
            return  # the next `join` notices it
        self._told = incarnation, troubles

    def _note_unserved(self) -> None:
        """Update `_stuck` and `_unserved`."""
        now, wall = time.monotonic(), self._broker.clock.wall_time_us() / 1e6
        stuck, unserved = {}, []
        for place, partition in self.partitions().items():
            reason = partition.why_unserved
            if reason is None:
                continue
            since = stuck[partition] = self._stuck.get(partition, _Stuck(now, wall))
            if now - since.at >= TROUBLE_S:
                unserved.append(Unserved(*place, since.wall, *reason))
        self._stuck, self._unserved = stuck, unserved

    @property
    def unserved(self) -> list[Unserved]:
        """The partitions that this broker owns and has not served for TROUBLE_S."""
        return self._unserved

    def close(self) -> None:
        """Release all partitions. Other brokers claim each one as soon as its ledger is closed."""
        self._is_closed = True
        self._wake.set()
        self._subscription.close()
        if self._thread is not None:
            self._thread.join(LOOK_S * 5)
        self._pool.shutdown(wait=False, cancel_futures=True)
        _log.flush()
        try:
            self._broker.membership.tell_leaving()
        except PxrsError as error:
            _logger.warning("the broker's record could not be marked as leaving: %s", error)
        with ToldPool(self._broker.settings.openings_max, "pxrs-releasing") as pool:
            for place, partition in self.partitions().items():
                pool.submit(self._release_last, place, partition)

    def _release_last(self, place: Place, partition: OwnedPartition) -> None:
        try:
            if not self._is_cut_off:
                self._release(place, partition, "the broker is stopping")
        except PxrsError as error:
            self._is_cut_off = True
            _logger.warning(
                "partition %s could not be released; others claim it after the lease expires: %s", partition.name, error
            )
        except Exception:
            _logger.exception("partition %s could not be released", partition.name)
        finally:
            self._give_up(place, PartitionMoved(f"{partition.name}: the broker is stopping"))


def _grounds(seen: Seen) -> Hashable:
    """What the outcome of an opening depends on, apart from the partition itself."""
    nodes = frozenset(
        (node, found.starts, node in seen.takers and found.refuses is None) for node, found in seen.alive.items()
    )
    return nodes, frozenset(seen.abandoned.items())


def _kinds(ownership: Ownership) -> list[tuple[tuple[str, ...], float]]:
    """The number of partitions that are not served, by the kind of the reason, for the metrics."""
    counts = Counter(each.kind for each in ownership.unserved)
    return [((kind,), counts[kind]) for kind in KINDS]


def _states(ownership: Ownership) -> list[tuple[tuple[str, ...], float]]:
    """The number of partitions in each state, for the metrics."""
    counts = Counter("serving" if each.why_not is None else "opening" for each in ownership.partitions().values())
    return [((state,), counts[state]) for state in ("serving", "opening")]
