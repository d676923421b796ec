"""All events: for each its name, the level and the text of its line in the log, and its fields.

The line of an event is the text with the fields filled in; the record of the log has `event` and all fields as
attributes too (`extra`). docs/events.md has the same table for people; a test compares the two.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PLACE: Final = ("group", "topic", "topic_id", "partition")
"""The fields that name a partition that a group reads."""
OWNER: Final = (*PLACE, "epoch", "member", "incarnation")
"""The fields of a change of the owner key: the partition, and its owner from this epoch on (null: nobody)."""
FOUND: Final = ("past",)
"""What the change found: the owners before it, the last one last, each as `[epoch, incarnation, member]`."""

ADOPTED_REGISTRY: Final = "hub.adopted_registry"
"""Owners by epoch that earlier events tell of are those of another registry."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event."""

    name: str
    text: str
    """The line in the log, with the names of fields in braces."""
    fields: tuple[str, ...]
    """All fields that such an event may have."""
    level: int = logging.INFO

    @property
    def logger(self) -> str:
        """The name of the logger, such as `pxrs.events.partition`."""
        return f"pxrs.events.{self.name.partition('.')[0]}"


_MEMBER: Final = ("group", "member", "incarnation")
_IN_PARTITION: Final = "group {group}, {topic}/{partition}"

_EVENTS: Final = (
    Kind("member.joined", "group {group}: {member} joined", (*_MEMBER, "host", "pid", "topics")),
    Kind("member.left", "group {group}: {member} left", (*_MEMBER, "partitions")),
    Kind(
        "member.lost_lease",
        "group {group}: the lease of {member} expired before it was renewed; it owned {partitions} partitions",
        (*_MEMBER, "partitions"),
    ),
    Kind(
        "member.stuck",
        "group {group}: {member} gave up its partitions: a handler made no progress for {seconds} s",
        (*_MEMBER, "seconds"),
        logging.WARNING,
    ),
    Kind(
        "member.failed",
        "group {group}: {member} ended because of an error: {error}",
        (*_MEMBER, "error", "error_type"),
    ),
    Kind(
        "group.assigned",
        "group {group}: {member} wrote the targets of generation {generation}",
        (*_MEMBER, "generation", "targets"),
    ),
    Kind(
        "partition.claimed",
        f"{_IN_PARTITION}: claimed by {{member}} with epoch {{epoch}}",
        (*OWNER, *FOUND),
    ),
    Kind(
        "partition.handed_over",
        f"{_IN_PARTITION}: handed over from {{from_member}} to {{member}} with epoch {{epoch}}",
        (*OWNER, "from_member", "from_incarnation", *FOUND),
    ),
    Kind(
        "partition.taken_over",
        f"{_IN_PARTITION}: taken over by {{member}} from {{from_member}}, whose lease expired, with epoch {{epoch}}",
        (*OWNER, "from_member", "from_incarnation", *FOUND),
    ),
    Kind(
        "partition.released",
        f"{_IN_PARTITION}: released by {{from_member}} with epoch {{epoch}}",
        (*OWNER, "from_member", "from_incarnation", *FOUND),
    ),
    Kind(
        "partition.fenced",
        f"{_IN_PARTITION}: fenced by the leader {{by}} with epoch {{epoch}}, because {{from_member}} did not release "
        "it in time",
        (*OWNER, "by", "from_member", "from_incarnation", *FOUND),
    ),
    Kind(
        "partition.freed",
        f"{_IN_PARTITION}: freed by an administrator ({{by}}) with epoch {{epoch}}",
        (*OWNER, "by", *FOUND),
    ),
    Kind(
        "partition.observed",
        f"{_IN_PARTITION}: upkeep found epoch {{epoch}}, which no event had reported",
        (*OWNER, *FOUND),
    ),
    Kind(
        "partition.lost",
        f"{_IN_PARTITION}: lost by {{member}} with epoch {{epoch}}: {{reason}}",
        (*OWNER, "reason", "has_undone"),
    ),
    Kind(
        "partition.refused",
        f"{_IN_PARTITION}: a checkpoint of {{member}} at offset {{offset}} was refused: its epoch {{epoch}} has ended",
        (*OWNER, "offset"),
    ),
    Kind(
        "partition.paused",
        f"{_IN_PARTITION}: paused at offset {{offset}}: {{error}}",
        (*OWNER, "offset", "error", "error_type"),
    ),
    Kind(
        "partition.retried",
        f"{_IN_PARTITION}: resumed by retrying offset {{offset}}",
        (*OWNER, "offset"),
    ),
    Kind("partition.skipped", f"{_IN_PARTITION}: resumed by skipping offset {{offset}}", (*OWNER, "offset")),
    Kind(
        "message.retried",
        f"{_IN_PARTITION}: offset {{offset}} is retried after a failure: {{error}}",
        (*OWNER, "offset", "error", "error_type", "tries"),
    ),
    Kind(
        "message.dead_lettered",
        f"{_IN_PARTITION}: offset {{offset}} was sent to the dead letters: {{error}}",
        (*OWNER, "offset", "error", "error_type"),
    ),
    Kind(
        "item.dead",
        "queue {queue}: item {item} became a dead letter after {deliveries} deliveries: {error}",
        ("queue", "queue_id", "item", "deliveries", "error", "error_type"),
    ),
    Kind(
        "item.returned",
        "queue {queue}: {count} items of taker {taker}, whose lease expired, are ready again",
        ("queue", "queue_id", "taker", "count", "items"),
    ),
    Kind("broker.joined", "broker {broker} joined the cluster at {address}", ("broker", "incarnation", "address")),
    Kind(
        "broker.left",
        "broker {broker} left the cluster and released {partitions} partitions",
        ("broker", "incarnation", "address", "partitions"),
    ),
    Kind(
        "partition.opened",
        "{topic}/{partition}: served by {broker} with epoch {epoch}, {seconds} s after its claim",
        ("topic", "topic_id", "partition", "broker", "incarnation", "address", "epoch", "seconds", "recovered"),
    ),
    Kind(
        "node.replaced",
        "ledger {ledger} of {topic} continues without storage node {node}: {error}",
        ("topic", "ledger", "node", "error"),
        logging.WARNING,
    ),
    Kind(
        "node.lost",
        "storage node {node} has been away for {seconds} s: its copies are recreated on other nodes",
        ("node", "seconds"),
        logging.WARNING,
    ),
    Kind("node.returned", "storage node {node} is back after {seconds} s", ("node", "seconds")),
    Kind(
        "ledger.repaired",
        "{topic}/{partition}: ledger {ledger} was repaired: {entries} entries copied in {seconds} s, {left} copies "
        "still missing",
        ("topic", "topic_id", "partition", "ledger", "entries", "nodes", "seconds", "left"),
    ),
    Kind(
        "ledger.ended_in_doubt",
        "{topic}/{partition}: ledger {ledger} was closed at offset {end} by answers of storage nodes that were in "
        "doubt: {nodes}",
        ("topic", "topic_id", "partition", "ledger", "end", "nodes"),
        logging.WARNING,
    ),
    Kind(
        "staged.repaired",
        "rows that query {query} staged for {topic}: ledger {ledger} was repaired: {entries} entries copied in "
        "{seconds} s, {left} copies still missing",
        ("topic", "topic_id", "query", "batch", "ledger", "entries", "nodes", "seconds", "left"),
    ),
    Kind(
        ADOPTED_REGISTRY,
        "the hub now belongs to the registry {registry}, and the epochs of its groups are those of that registry",
        ("registry", "former"),
    ),
    Kind(
        "upkeep.round",
        "upkeep: a round took {took_s} s; it removed messages of {topics} topics, and {failures} duties failed",
        ("by", "took_s", "removed", "errors", "topics", "failures"),
    ),
    Kind(
        "events.dropped",
        "{count} events were dropped, because the buffer was full",
        ("count", "reason"),
        logging.WARNING,
    ),
)

_AUDIT: Final = (
    ("create_topic", "topic {topic} was created", ("topic", "topic_id", "partitions")),
    ("delete_topic", "topic {topic} was deleted", ("topic", "topic_id")),
    ("alter_topic", "settings of topic {topic} were changed", ("topic", "topic_id", "changes")),
    ("copy_topic", "topic {topic} was copied to {target}", ("topic", "topic_id", "target", "messages")),
    ("create_queue", "queue {queue} was created", ("queue",)),
    ("delete_queue", "queue {queue} was deleted", ("queue",)),
    ("alter_queue", "settings of queue {queue} were changed", ("queue", "changes")),
    ("purge", "{count} dead items of queue {queue} were removed", ("queue", "items", "count")),
    ("requeue", "{count} dead items of queue {queue} were put back", ("queue", "items", "count")),
    ("add_source", "source {source} was registered", ("source", "source_id")),
    ("remove_source", "source {source} was removed", ("source", "source_id")),
    ("reset", "group {group} was reset", ("group", "topic", "offsets", "force")),
    ("import_checkpoint", "checkpoints of group {group} were imported", ("group", "topic", "offsets", "force")),
    ("delete_group", "group {group} was deleted", ("group", "topic", "force")),
    ("retry", "group {group}, {topic}/{partition}: the failed message is retried", ("offset", *PLACE)),
    ("skip", "group {group}, {topic}/{partition}: the failed message is skipped", ("offset", *PLACE)),
    ("adopt_registry", "the hub now belongs to the registry {registry}", ("registry", "former")),
    ("backup", "the hub was backed up to {target}", ("target", "topics", "messages")),
    ("restore", "the hub was restored from {origin}", ("origin", "topics", "messages")),
    ("repair", "the hub was repaired: {what}", ("what", "topic", "partition")),
    (
        "cut_short",
        "{action} failed and may have been partly done: {error}",
        ("action", "group", "queue", "topic", "partition", "source", "target", "error", "error_type"),
    ),
    ("act_on_page", "{what}, through the web page", ("what",)),
    ("retire_node", "storage node {node} was retired", ("node",)),
    ("reinstate_node", "storage node {node} is in use again", ("node",)),
    ("forget_node", "storage node {node} was forgotten", ("node",)),
    (
        "abandon_nodes",
        "{count} ledgers continue without the storage nodes {nodes}; acknowledged messages may be lost",
        ("nodes", "ledgers", "count"),
    ),
    ("retain", "retention of topic {topic} was applied", ("topic", "starts")),
)

KINDS: Final = {
    **{each.name: each for each in _EVENTS},
    **{
        f"audit.{action}": Kind(f"audit.{action}", f"{{who}}: {text}", ("who", "claimed_by", *fields))
        for action, text, fields in _AUDIT
    },
}
"""Every event by its name."""


def kind_of(name: str) -> Kind:
    """The kind of this name. One that the table does not have, as a later version may record, has a line without
    text."""
    return KINDS.get(name) or Kind(name, name, ())


class _Shown(dict[str, object]):
    def __missing__(self, name: str) -> str:
        return "?"


def text_of(name: str, fields: Iterable[tuple[str, object]]) -> str:
    """The text of an event for people. A field that is missing is shown as a question mark."""
    return kind_of(name).text.format_map(_Shown(fields))
