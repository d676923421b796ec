"""The log of a cluster at a broker: see `pxrs.log.contract.Log`. Topics are records in the registry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pxrs.cluster import records
from pxrs.cluster.broker.context import Broker
from pxrs.cluster.broker.ownership import Ownership
from pxrs.cluster.broker.staging import ClusterStaging
from pxrs.cluster.broker.topic import OwnedTopic
from pxrs.cluster.ledgers import LedgerName, Quorum
from pxrs.cluster.placement import shortfall, storage_candidates
from pxrs.cluster.records import NOBODY, DeletedTopic, OwnerRecord, TopicRecord
from pxrs.errors import Closed, Conflict, PartitionMoved, PxrsError, TopicDeleted, TopicExists, UnknownTopic
from pxrs.log.contract import DamagedTopic, Log, TopicLog
from pxrs.model import STORED_TOPIC_NAME, Topic, is_internal
from pxrs.publishing.staging.contract import HasStaging
from pxrs.registry.contract import ABSENT
from pxrs.remote.client.routed import RoutedTopic
from pxrs.remote.client.routes import Peers

_logger = logging.getLogger(__name__)

TRIES_MAX: Final = 100
"""How often a change of a topic is repeated after a conflict with another change."""
ASKERS_MAX: Final = 16
"""Maximum number of threads for calls that concern several brokers."""
PATIENCE_S: Final = 30.0
"""How long a call waits until each of its partitions has an owner that answers."""
GIVEN_UP_S: Final = 10.0
"""How long a deletion waits until the owners of the topic's partitions have given them up. Longer than a broker's lease
lives by default, so that an owner that hangs is waited for, too."""
LOOK_S: Final = 0.5
"""How often a deletion looks whether the owners have given the topic up, although no change was seen."""


class BrokerRoutes:
    """The handle for each partition: this broker itself, or a client of the owner (`routed.Routes`)."""

    def __init__(self, record: TopicRecord, log: ClusterLog) -> None:
        self._record, self._log = record, log
        self.local = log.local(record)
        """The handle for partitions of this broker. Always the same object, by which `RoutedTopic` notices that a
        partition has moved."""
        self._forgotten: dict[int, float] = {}

    def check(self) -> None:
        self._log.check_usable()

    def owners(self) -> dict[int, str]:
        seen, topic = self._log.broker.view.seen, self._record.topic
        found = {}
        for partition in range(topic.partitions):
            owner = seen.owners.get((topic.id, partition), (OwnerRecord(), 0))[0]
            if owner.address and owner.broker in seen.brokers:
                found[partition] = owner.address
        return found

    def handle(self, partition: int) -> TopicLog:
        log, topic = self._log, self._record.topic
        log.check_usable()
        if log.ownership.owned(topic.id, partition) is not None:
            return self.local
        if partition in self._forgotten:
            del self._forgotten[partition]
            seen = log.broker.view.refresh()
        else:
            seen = log.broker.view.seen
        found = seen.topics.get(topic.name)
        if found is None or found[0].topic.id != topic.id:
            log.check_topic(topic)
        owner = seen.owners.get((topic.id, partition), (OwnerRecord(), 0))[0]
        if not owner.address or owner.broker not in seen.brokers or owner.broker == log.broker.membership.incarnation:
            self._forgotten[partition] = 0.0
            raise PartitionMoved(f"{topic.name}/{partition}: no broker serves the partition yet")
        return log.peers.topic(owner.address, topic)

    def forget(self, partition: int, handle: TopicLog) -> None:
        self._forgotten[partition] = 0.0


class ClusterTopic(RoutedTopic):
    """A topic at a broker. Calls for partitions of other brokers are forwarded to their owners."""

    def __init__(self, record: TopicRecord, log: ClusterLog) -> None:
        routes = BrokerRoutes(record, log)
        super().__init__(record.topic, routes, log.askers, PATIENCE_S)
        self._log, self._local = log, routes.local
        self.clock = log.clock

    @property
    def local(self) -> TopicLog:
        return self._local


class ClusterLog(Log, HasStaging):
    """The topics of the cluster. Threads share it."""

    keeps_copies = True

    def __init__(self, broker: Broker, ownership: Ownership, peers: Peers, cluster: str, url: str) -> None:
        """cluster: the cluster's id. url: names the log in messages."""
        self.url, self.clock = url, broker.clock
        self.broker, self.ownership, self.peers = broker, ownership, peers
        self._cluster = cluster
        self._staging = ClusterStaging(broker)
        self.askers = ThreadPoolExecutor(ASKERS_MAX, "pxrs-brokers")
        """Threads for calls to several brokers at once. They are not those of `Broker.crew`, because an append on one
        of these threads waits for commits that run on the crew."""
        self._is_closed = False

    @property
    def staging(self) -> ClusterStaging:
        return self._staging

    def create_topic(self, topic: Topic) -> TopicLog:
        self.check_usable()
        chosen = {name: getattr(topic, name) for name in ("ensemble", "write_quorum", "ack_quorum")}
        quorum = Quorum(**{name: value for name, value in chosen.items() if value is not None})
        record = TopicRecord(topic, quorum, self.broker.settings.placement)
        key = records.topic_key(topic.name)
        try:
            self.broker.registry.commit({key: ABSENT}, {key: record.dump()})
        except Conflict:
            raise TopicExists(f"topic {topic.name!r} already exists") from None
        self.broker.view.look_again()
        made = ClusterTopic(record, self)
        lack = shortfall(quorum, len(storage_candidates(self.broker.view.seen.takers)))
        if lack is not None:
            made.warnings = (lack.warning(topic.name),)
        return made

    def topics(self) -> list[Topic]:
        self.check_usable()
        return sorted((record.topic for record in self._records().values()), key=lambda topic: topic.name)

    def _records(self) -> dict[str, TopicRecord]:
        return {
            entry.key.removeprefix(records.TOPICS): TopicRecord.parse(entry.key, entry.value)
            for entry in self.broker.registry.scan(records.TOPICS)
        }

    def damaged_topics(self) -> list[DamagedTopic]:
        self.check_usable()
        return []

    def topic(self, name: str) -> TopicLog:
        """The topic, from the records that this broker has last read if they contain it: every call of a client looks
        up its topic here, and must not wait for a registry that does not answer. If the topic was deleted since, its
        partitions have no owner, and the call fails then."""
        self.check_usable()
        known = self.broker.view.seen.topics.get(name)
        return ClusterTopic(self._record(name)[0] if known is None else known[0], self)

    def topic_now(self, name: str) -> TopicLog:
        return ClusterTopic(self._record(name)[0], self)

    def _record(self, name: str) -> tuple[TopicRecord, int]:
        self.check_usable()
        is_name = isinstance(name, str) and STORED_TOPIC_NAME.fullmatch(name) is not None
        entry = self.broker.registry.get(records.topic_key(name)) if is_name else None
        if entry is None:
            raise UnknownTopic(name, sorted(each for each in self._records() if not is_internal(each)))
        return TopicRecord.parse(entry.key, entry.value), entry.version

    def alter_topic(self, name: str, changes: Mapping[str, object]) -> TopicLog:
        key = records.topic_key(name)
        for _ in range(TRIES_MAX):
            record, version = self._record(name)
            altered = TopicRecord(record.topic.altered(changes), record.quorum, record.placement)
            try:
                self.broker.registry.commit({key: version}, {key: altered.dump()})
            except Conflict:
                continue
            self.broker.view.refresh()
            return ClusterTopic(altered, self)
        raise TopicExists(f"the settings of {name} were changed by others at every attempt: try again")

    def delete_topic(self, name: str) -> str:
        key = records.topic_key(name)
        for _ in range(TRIES_MAX):
            record, version = self._record(name)
            gone = DeletedTopic(name, record.topic.partitions, time.time())
            try:
                self.broker.registry.commit(
                    {key: version}, {records.deleted_key(record.topic.id): gone.dump()}, delete=[key]
                )
            except Conflict:
                continue
            self.broker.view.refresh()
            self._wait_until_given_up(record.topic.id, name)
            self.broker.crew.submit(self._finish, record.topic.id, gone)
            return record.topic.id
        raise TopicExists(f"topic {name} was changed by others at every attempt: try again")

    def finish_deletions(self) -> None:
        for entry in self.broker.registry.scan(records.DELETED):
            gone, topic_id = DeletedTopic.parse(entry.key, entry.value), entry.key.removeprefix(records.DELETED)
            self._wait_until_given_up(topic_id, gone.name)  # before `_finish` removes the records that tell so
            self._finish(topic_id, gone)

    def _wait_until_given_up(self, topic_id: str, name: str) -> None:
        """Wait until no broker takes appends to a deleted topic, at most GIVEN_UP_S. Nobody claims a partition of it
        any more: a claim expects the topic's record. An owner gives its partitions up and releases them, or loses its
        lease and stops to answer (C4)."""
        until, changed = time.monotonic() + GIVEN_UP_S, threading.Event()
        with self.broker.view.subscribe(changed.set):
            while left := self._owners_left(topic_id):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                changed.wait(min(LOOK_S, left_s))
                changed.clear()
            else:
                return
        _logger.warning(
            "topic %s was deleted, but these brokers have not given it up yet and may still accept messages, which "
            "will be lost: %s",
            name,
            ", ".join(left),
        )

    def _owners_left(self, topic_id: str) -> list[str]:
        """The brokers that live and own partitions of the topic."""
        registry = self.broker.registry
        try:
            entries = registry.scan(f"{records.OWNERS}{topic_id}/")
            owners = {OwnerRecord.parse(entry.key, entry.value).broker for entry in entries} - {NOBODY}
            return [owner for owner in sorted(owners) if registry.get(records.broker_key(owner)) is not None]
        except PxrsError as error:
            return [f"unknown, because the registry cannot be read: {error}"]

    def _finish(self, topic_id: str, gone: DeletedTopic) -> None:
        """Remove the records of a deleted topic (P7). Storage nodes then remove its ledgers as garbage."""
        for _ in range(TRIES_MAX):
            try:
                self._remove(topic_id, gone)
                return
            except Conflict:
                continue  # the owner of a partition has begun a ledger or released the partition
            except PxrsError as error:
                _logger.info("some records of the deleted topic %s will be removed later: %s", gone.name, error)
                return

    def _remove(self, topic_id: str, gone: DeletedTopic) -> None:
        """Raises Conflict, and what the registry raises."""
        registry = self.broker.registry
        for partition in range(gone.partitions):
            key = records.owner_key(topic_id, partition)
            entry = registry.get(key)
            if entry is not None:
                owner = OwnerRecord.parse(entry.key, entry.value)
                if not owner.is_deleted:  # after this commit no broker can create a ledger of this partition
                    registry.commit({key: entry.version}, {key: owner.deleted().dump()})
            for ledger in registry.scan(records.ledgers_prefix(topic_id, partition)):
                decision = records.abandoned_key(LedgerName.of_key(ledger.key))
                registry.commit(delete=[ledger.key, decision])
        for partition in range(gone.partitions):
            registry.commit(delete=[records.owner_key(topic_id, partition)])
        registry.commit(delete=[records.deleted_key(topic_id)])

    def identity(self, *, joins: bool) -> tuple[str, str]:
        return self._cluster, f"cluster {self._cluster[:8]}"

    def local(self, record: TopicRecord) -> OwnedTopic:
        """The handle for the partitions of a topic that this broker owns."""
        return OwnedTopic(record, self.broker, self.ownership)

    def check_topic(self, topic: Topic) -> None:
        """Raise TopicDeleted if the topic does not exist any more."""
        entry = self.broker.registry.get(records.topic_key(topic.name))
        found = None if entry is None else TopicRecord.parse(entry.key, entry.value).topic.id
        if found != topic.id:
            raise TopicDeleted(topic.name, topic.id, is_made_again=found is not None)

    def check_usable(self) -> None:
        if self._is_closed:
            raise Closed(f"the log of {self.url} was closed")
        self.broker.registry.check_usable()

    def close(self) -> None:
        self._is_closed = True
        self.askers.shutdown(wait=False, cancel_futures=True)
