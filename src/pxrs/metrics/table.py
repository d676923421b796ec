"""The table of all metrics: pure values, no counting.

Each metric has one name, OpenTelemetry's, such as `pxrs.producer.messages`. Its name in Prometheus follows by the rules
by which OpenTelemetry's exporters translate names: dots become underscores, the unit is a suffix (`_seconds`,
`_bytes`), and a counter ends with `_total`. docs/metrics.md has this table too, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The upper bounds of the buckets of every histogram, in seconds; the last bucket has none."""

ATTRIBUTES: Final = {
    "topic": "messaging.destination.name",
    "queue": "messaging.destination.name",
    "group": "messaging.consumer.group.name",
    "error": "error.type",
}
"""The attributes of OpenTelemetry's semantic conventions that labels are exported as. Other labels, such as `call`, are
exported as `pxrs.<label>`."""
_SUFFIXES: Final = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """OpenTelemetry's name."""
    kind: Kind
    unit: str
    """As UCUM writes it: `s`, `By`, or a noun in braces."""
    labels: tuple[str, ...]
    text: str
    """What is counted or measured, as one sentence."""

    @property
    def prometheus(self) -> str:
        """The name in Prometheus."""
        name = self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "")
        return f"{name}_total" if self.kind == "counter" else name

    def attribute(self, label: str) -> str:
        """The name of a label as an attribute of OpenTelemetry."""
        return ATTRIBUTES.get(label, f"pxrs.{label}")


TABLE: Final[dict[str, Metric]] = {}
"""All metrics by name, in the order of the documentation."""


def _metric(name: str, kind: Kind, unit: str, labels: str, text: str) -> Metric:
    found = TABLE[name] = Metric(name, kind, unit, tuple(labels.split()), text)
    return found


PRODUCER_MESSAGES: Final = _metric(
    "pxrs.producer.messages", "counter", "{message}", "topic", "Messages that producers have stored."
)
PRODUCER_BYTES: Final = _metric(
    "pxrs.producer.stored", "counter", "By", "topic", "Encoded bytes of the batches that producers have stored."
)
PRODUCER_BATCHES: Final = _metric(
    "pxrs.producer.batches", "counter", "{batch}", "topic", "Batches that producers have stored."
)
PRODUCER_APPEND: Final = _metric(
    "pxrs.producer.append", "histogram", "s", "topic", "Duration of each append to the log, including failed ones."
)
PRODUCER_RETRIES: Final = _metric(
    "pxrs.producer.retries", "counter", "{batch}", "topic", "Batches that were sent again after a failed attempt."
)
PRODUCER_ERRORS: Final = _metric(
    "pxrs.producer.errors",
    "counter",
    "{batch}",
    "topic error",
    "Batches that could not be stored, by the class of the error.",
)
PRODUCER_BUFFER: Final = _metric(
    "pxrs.producer.buffer",
    "gauge",
    "By",
    "topic",
    "Bytes that count towards `buffer_bytes`; the open chunk of small messages counts once it is sealed.",
)
CONSUMER_MESSAGES: Final = _metric(
    "pxrs.consumer.messages", "counter", "{message}", "group topic", "Messages that consumers have handed out."
)
CONSUMER_BATCHES: Final = _metric(
    "pxrs.consumer.batches", "counter", "{batch}", "group topic", "Batches of which consumers have handed out messages."
)
CONSUMER_POLL: Final = _metric(
    "pxrs.consumer.poll",
    "histogram",
    "s",
    "group",
    "How long each call that asks for messages waited until some arrived or its timeout expired.",
)
CONSUMER_HANDLING: Final = _metric(
    "pxrs.consumer.handling", "counter", "s", "group topic", "Time spent in the handlers of `run` and `pxrs worker`."
)
CONSUMER_FAILURES: Final = _metric(
    "pxrs.consumer.failures",
    "counter",
    "{failure}",
    "group topic outcome",
    "Failures of handlers, by what followed: retried, paused, dead-letter, raised or released.",
)
CONSUMER_COMMITS: Final = _metric(
    "pxrs.consumer.commits",
    "counter",
    "{checkpoint}",
    "group outcome",
    "Checkpoints that members sent to the registry: written; refused, because another member owns the partition; "
    "changed by others and written again; unknown, because the reply was lost.",
)
CONSUMER_COMMIT: Final = _metric(
    "pxrs.consumer.commit",
    "histogram",
    "s",
    "group",
    "Duration of each write of checkpoints, including failed ones.",
)
CONSUMER_MOVES: Final = _metric(
    "pxrs.consumer.rebalanced",
    "counter",
    "{partition}",
    "group change",
    "Partitions that members have gained or given up: assigned, revoked, released, lost.",
)
CONSUMER_PARTITIONS: Final = _metric(
    "pxrs.consumer.partitions", "gauge", "{partition}", "group topic", "Partitions that consumers own now."
)
CONSUMER_LAG: Final = _metric(
    "pxrs.consumer.lag",
    "gauge",
    "{message}",
    "group topic",
    "Messages of the owned partitions that are not done yet; for a table, an upper bound.",
)
QUEUE_PUT: Final = _metric(
    "pxrs.queue.put", "counter", "{item}", "queue", "Items that were put, by transactions or directly."
)
QUEUE_TAKEN: Final = _metric("pxrs.queue.taken", "counter", "{item}", "queue", "Deliveries of items to transactions.")
QUEUE_DONE: Final = _metric("pxrs.queue.done", "counter", "{item}", "queue", "Items whose transaction was committed.")
QUEUE_RETRIED: Final = _metric(
    "pxrs.queue.retried", "counter", "{item}", "queue", "Items that were returned for another delivery."
)
QUEUE_DEAD: Final = _metric("pxrs.queue.dead", "counter", "{item}", "queue", "Items that became dead letters.")
QUEUE_IN_FLIGHT: Final = _metric(
    "pxrs.queue.in_flight", "gauge", "{item}", "queue", "Items that open transactions of this process have taken."
)
UPKEEP_ROUNDS: Final = _metric("pxrs.upkeep.rounds", "counter", "{round}", "", "Rounds of upkeep.")
UPKEEP_ROUND: Final = _metric("pxrs.upkeep.round", "histogram", "s", "", "Duration of each round of upkeep.")
UPKEEP_ERRORS: Final = _metric("pxrs.upkeep.errors", "counter", "{error}", "", "Duties of upkeep that failed.")
UPKEEP_REMOVED: Final = _metric(
    "pxrs.upkeep.removed", "counter", "By", "topic", "Bytes of segments that retention has removed."
)
SERVER_STREAMS: Final = _metric("pxrs.server.streams", "gauge", "{stream}", "method", "Open gRPC calls.")
SERVER_STREAM: Final = _metric(
    "pxrs.server.streams_ended",
    "counter",
    "{stream}",
    "method outcome",
    "gRPC calls that have ended: ok; cancelled by the client; refused, see `pxrs.server.refused`; error.",
)
SERVER_CALLS: Final = _metric(
    "pxrs.server.calls",
    "counter",
    "{call}",
    "call outcome",
    "Calls of the wire protocol, on a control stream or as an action: ok or error.",
)
SERVER_CALL: Final = _metric(
    "pxrs.server.call", "histogram", "s", "call", "How long the hub took for each call of the wire protocol."
)
SERVER_RECEIVED: Final = _metric(
    "pxrs.server.received", "counter", "By", "method", "Bytes of messages that were received from clients."
)
SERVER_SENT: Final = _metric(
    "pxrs.server.sent", "counter", "By", "method", "Bytes of messages that were sent to clients."
)
SERVER_REFUSED: Final = _metric(
    "pxrs.server.refused",
    "counter",
    "{call}",
    "reason",
    "Calls that were refused, by the class of the error: no token, no permission, a limit, a stopping server.",
)
STORAGE_ENTRIES: Final = _metric(
    "pxrs.storage.entries", "counter", "{entry}", "", "Entries that the storage node has synced."
)
STORAGE_WRITTEN: Final = _metric(
    "pxrs.storage.written", "counter", "By", "", "Bytes that the storage node has synced, with headers and compaction."
)
STORAGE_SYNC: Final = _metric(
    "pxrs.storage.sync", "histogram", "s", "", "Duration of writing and syncing one batch of the journal."
)
STORAGE_FAILURES: Final = _metric(
    "pxrs.storage.failures", "counter", "{failure}", "", "Batches of the journal that could not be written or synced."
)
STORAGE_REMOVED: Final = _metric(
    "pxrs.storage.removed", "counter", "{ledger}", "", "Ledgers that the storage node has removed as garbage."
)
STORAGE_BYTES: Final = _metric("pxrs.storage.stored", "gauge", "By", "", "Bytes of the entries on the storage node.")
STORAGE_LEDGERS: Final = _metric("pxrs.storage.ledgers", "gauge", "{ledger}", "", "Ledgers on the storage node.")
STORAGE_FREE: Final = _metric("pxrs.storage.free", "gauge", "By", "", "Free bytes on the disk of the storage node.")
STORAGE_REFUSES: Final = _metric(
    "pxrs.storage.refuses", "gauge", "{node}", "", "1 while the storage node accepts no entries, as on a full disk."
)
STORAGE_DOUBTS: Final = _metric(
    "pxrs.storage.doubts",
    "gauge",
    "{ledger}",
    "",
    "Ledgers in doubt: after a power loss or damage, the storage node does not know which of their entries it lacks.",
)
STORAGE_DAMAGED: Final = _metric(
    "pxrs.storage.damaged",
    "gauge",
    "{entry}",
    "",
    "Entries and ranges of the journal that are damaged on the disk of the storage node and not repaired yet.",
)
STORAGE_SCRUBBED: Final = _metric(
    "pxrs.storage.scrubbed", "counter", "By", "", "Bytes of sealed segments that scrubbing has read."
)
STORAGE_SCRUB_LEFT: Final = _metric(
    "pxrs.storage.scrub_left", "gauge", "By", "", "Bytes of sealed segments that this round of scrubbing has left."
)
STORAGE_SCRUB_ENDED: Final = _metric(
    "pxrs.storage.scrub_ended", "gauge", "s", "", "When the last round of scrubbing ended, in seconds since 1970; or 0."
)
BROKER_PARTITIONS: Final = _metric(
    "pxrs.broker.partitions",
    "gauge",
    "{partition}",
    "state",
    "Partitions that the broker owns: serving, or opening, which includes those that could not be opened.",
)
BROKER_UNSERVED: Final = _metric(
    "pxrs.broker.unserved",
    "gauge",
    "{partition}",
    "reason",
    "Partitions that the broker owns and has not served for 2 s: too few storage nodes accept entries (nodes), the "
    "topic's placement function fails (placement), what is stored cannot be recovered or read (recovery), or other.",
)
BROKER_ENTRIES: Final = _metric(
    "pxrs.broker.entries",
    "counter",
    "{entry}",
    "",
    "Entries that the broker has sent to storage nodes: one for each append to a partition.",
)
BROKER_CONFIRMED: Final = _metric(
    "pxrs.broker.confirmed",
    "counter",
    "{entry}",
    "",
    "Entries that enough storage nodes have acknowledged.",
)
BROKER_CONFIRM: Final = _metric(
    "pxrs.broker.confirm",
    "histogram",
    "s",
    "",
    "How long it took until enough storage nodes had acknowledged an entry.",
)
BROKER_REPLACED: Final = _metric(
    "pxrs.broker.replaced",
    "counter",
    "{node}",
    "",
    "Storage nodes that failed while a ledger was written, and were replaced or left out.",
)
BROKER_RECOVERY: Final = _metric(
    "pxrs.broker.recovery",
    "histogram",
    "s",
    "outcome",
    "Duration of each recovery of a ledger whose writer was gone: closed, or failed and to be retried.",
)
BROKER_OPENING: Final = _metric(
    "pxrs.broker.opening",
    "histogram",
    "s",
    "outcome",
    "Duration of each opening of a partition, including the recovery of its last ledger: serving, or failed.",
)
BROKER_DEGRADED: Final = _metric(
    "pxrs.broker.degraded",
    "gauge",
    "{ledger}",
    "",
    "Ledgers that are written with fewer storage nodes than the topic asks for.",
)
BROKER_LACKING: Final = _metric(
    "pxrs.broker.lacking",
    "gauge",
    "{ledger}",
    "kind",
    "Closed ledgers that lack copies, or were not checked yet, and that the broker has to repair: of its partitions "
    "(partition), or of rows that Spark has staged (staged).",
)
BROKER_REPAIRING: Final = _metric(
    "pxrs.broker.repairing",
    "gauge",
    "{ledger}",
    "",
    "Ledgers whose copies the broker is recreating or checking.",
)
BROKER_REPAIRS: Final = _metric(
    "pxrs.broker.repairs",
    "counter",
    "{ledger}",
    "outcome",
    "Ledgers whose copies were recreated or checked: repaired, or failed and to be retried.",
)
BROKER_REPAIR_FAILED: Final = _metric(
    "pxrs.broker.repair_failed",
    "gauge",
    "s",
    "",
    "When a repair last failed, in seconds since 1970; absent if none has failed since the broker was started.",
)
BROKER_COPIED: Final = _metric(
    "pxrs.broker.copied",
    "counter",
    "By",
    "",
    "Bytes that were copied to other storage nodes.",
)
BROKER_COPIED_ENTRIES: Final = _metric(
    "pxrs.broker.copied_entries",
    "counter",
    "{entry}",
    "",
    "Entries that were copied to other storage nodes.",
)
SPARK_BATCHES: Final = _metric(
    "pxrs.spark.batches", "counter", "{batch}", "query", "Micro-batches that Spark has finished."
)
SPARK_ROWS: Final = _metric("pxrs.spark.rows", "counter", "{row}", "query", "Rows that these batches have read.")
SPARK_BATCH: Final = _metric("pxrs.spark.batch", "histogram", "s", "query", "Duration of each batch.")
SPARK_FAILURES: Final = _metric(
    "pxrs.spark.failures", "counter", "{query}", "query", "Queries that ended with an error."
)
SPARK_LAG: Final = _metric(
    "pxrs.spark.lag",
    "gauge",
    "{message}",
    "query",
    "Messages that were left to read after the last batch, if that is known.",
)
SPARK_STATE: Final = _metric("pxrs.spark.state", "gauge", "{row}", "query", "Rows of state after the last batch.")
WORKER_RESTARTS: Final = _metric(
    "pxrs.worker.restarts", "counter", "{process}", "worker", "Worker processes that died and were restarted."
)
WORKER_PROCESSES: Final = _metric(
    "pxrs.worker.processes",
    "gauge",
    "{process}",
    "state",
    "Worker processes by state: starting, ready, away, stopping, silent, stopped.",
)
METRICS_ERRORS: Final = _metric(
    "pxrs.metrics.errors",
    "counter",
    "{error}",
    "metric",
    "Values that could not be read for an export; the log says why.",
)

# What `pxrs metrics` reads from the hub, whichever processes run.
HUB_TOPIC_MESSAGES: Final = _metric(
    "pxrs.topic.messages", "gauge", "{message}", "topic", "Messages of a topic, in all its partitions."
)
HUB_TOPIC_END: Final = _metric(
    "pxrs.topic.offsets",
    "counter",
    "{offset}",
    "topic",
    "The sum of the ends of a topic's partitions: its rate is the rate of messages.",
)
HUB_TOPIC_BYTES: Final = _metric(
    "pxrs.topic.size", "gauge", "By", "topic", "Bytes of a topic's files; only where the hub's directory can be read."
)
HUB_TOPIC_PARTITIONS: Final = _metric(
    "pxrs.topic.partitions", "gauge", "{partition}", "topic", "Partitions of a topic."
)
HUB_GROUP_LAG: Final = _metric(
    "pxrs.group.lag",
    "gauge",
    "{message}",
    "group topic",
    "Messages between the group's checkpoints and the ends of the topic; absent if that is not known.",
)
HUB_GROUP_LAG_MAX: Final = _metric(
    "pxrs.group.lag_max", "gauge", "{message}", "group topic", "The largest lag of any partition."
)
HUB_GROUP_AGE: Final = _metric(
    "pxrs.group.checkpoint.age",
    "gauge",
    "s",
    "group topic",
    "The age of the oldest checkpoint among the partitions that have a lag; 0 if none has.",
)
HUB_GROUP_MEMBERS: Final = _metric("pxrs.group.members", "gauge", "{member}", "group", "Members of a group.")
HUB_GROUP_UNOWNED: Final = _metric(
    "pxrs.group.partitions.unowned", "gauge", "{partition}", "group", "Partitions of a group that no member owns."
)
HUB_GROUP_PAUSED: Final = _metric(
    "pxrs.group.partitions.paused", "gauge", "{partition}", "group", "Partitions that a failed message has paused."
)
HUB_QUEUE_ITEMS: Final = _metric(
    "pxrs.queue.items", "gauge", "{item}", "queue state", "Items of a queue: ready, delayed, in_flight, dead."
)
HUB_AGE: Final = _metric("pxrs.hub.age", "gauge", "s", "", "Age of the values that were read from the hub.")
HUB_READ: Final = _metric("pxrs.hub.read", "gauge", "s", "", "Duration of the last reading of the hub.")
HUB_UP: Final = _metric(
    "pxrs.hub.up",
    "gauge",
    "{hub}",
    "",
    "1 if the last reading of the hub succeeded; 0 if it failed, so that the values are older.",
)
