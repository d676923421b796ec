"""Errors of the message log and of sources that are read like topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol, Self

from pxrs.errors.general import InvalidArgument, NoWritePermission, PxrsError, differing, restore
from pxrs.wording import counted, existing


class LogError(PxrsError):
    """The base of every error of the message log."""

    code = "log"


class LogNotWritable(NoWritePermission, LogError):
    """This process may read the hub's directory and not write to it: see NoWritePermission."""

    code = "log.not-writable"


class LogNotReadable(LogError):
    """This process may not read a file or folder of the hub's directory: `path`. That says nothing about what the file
    holds; it need not be damaged.

    Run the process as a user that has the permission, or give it, for all of the directory; then open the hub again."""

    code = "log.not-readable"

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(what)


class UnknownTopic(LogError, KeyError):
    """The topic does not exist. Create it, or correct the name; `choices` has the existing topics."""

    code = "log.unknown-topic"

    def __init__(self, topic: str, choices: Sequence[str] = ()) -> None:
        self.topic, self.choices = topic, tuple(choices)
        known = f"; {existing(choices)}" if choices else ""
        super().__init__(f"no topic {self.topic!r}{known}; create it with create_topic or `pxrs topic create`")


class TopicDeleted(UnknownTopic):
    """The topic that this handle, producer or consumer was opened for has been deleted.

    `id` is the deleted topic's. `is_made_again`: a new topic was created under the name, with messages and offsets of
    its own; to use it, open the topic, producer or consumer again. `advice` says what to do where there is no handle to
    open again, as in a query of Spark."""

    code = "log.topic-deleted"

    def __init__(self, topic: str, id: str, is_made_again: bool, advice: str = "") -> None:
        super().__init__(topic)
        self.id, self.is_made_again, self.advice = id, is_made_again, advice
        if advice:
            again = " and created again" if is_made_again else ""
            text = f"topic {topic!r} was deleted{again}. {advice}"
        elif is_made_again:
            text = (
                f"topic {topic!r} was deleted and created again, and this handle refers to the deleted topic (id "
                f"{id}); to use the new one, open it again"
            )
        else:
            text = f"topic {topic!r} was deleted; create it with create_topic or `pxrs topic create`, then open it"
        LogError.__init__(self, text)  # replaces the text that UnknownTopic has made


class UnknownSource(LogError, KeyError):
    """No source is registered under this name. Register it, or correct the name; `choices` has the registered
    sources."""

    code = "log.unknown-source"

    def __init__(self, source: str, choices: Sequence[str] = ()) -> None:
        self.source, self.choices = source, tuple(choices)
        known = f"; {existing(choices)}" if choices else ""
        super().__init__(
            f"no source {self.source!r} is registered{known}; register it with add_source or `pxrs source add`"
        )


class SourceExists(LogError):
    """A source of this name is already registered, or a topic has the name; the message says which settings differ. Use
    it, choose another name, or remove it first."""

    code = "log.source-exists"


class WrongSource(LogError):
    """The address that this process gave for a registered source is that of another database. Nothing was read.

    Correct the address; or, if the database has moved there, register the source again under its id."""

    code = "log.wrong-source"


class HubMoved(LogError):
    """The hub's directory is not where it was when it was opened: it was renamed or removed, or another one was put in
    its place. Nothing was read or written. Open the hub again at its current path."""

    code = "log.hub-moved"

    def __init__(self, place: str, what: str) -> None:
        self.place, self.what = place, what
        super().__init__(f"{place}: {what} while this process had it open; open the hub again at its current path")


class NoDirectory(LogError):
    """A hub that was opened with a registry and without a directory was asked for topics, or to change a group that
    reads topics. Nothing was done. Pass the directory too: `pxrs.open(DIRECTORY, registry=...)`. For a group that reads
    another source, name the source: `hub.group(NAME, source)`."""

    code = "log.no-directory"

    def __init__(self, registry: str) -> None:
        self.registry = registry
        super().__init__(
            f"the hub with the registry {registry} was opened without a directory, so it has no topics and cannot "
            "change groups that read topics: use pxrs.open(DIRECTORY, registry=...), or pass --at"
        )


class TopicExists(LogError):
    """A topic of this name already exists. Use it, or choose another name."""

    code = "log.topic-exists"


class TopicDiffers(TopicExists):
    """`create_topic(exist_ok=True)` found a topic of this name with other settings. Nothing was changed. Request the
    settings of the existing topic, or choose another name.

    `differences` maps each argument that differs to the topic's value and the requested value."""

    code = "log.topic-differs"

    def __init__(self, topic: str, differences: Mapping[str, tuple[object, object]]) -> None:
        self.topic, self.differences = topic, dict(differences)
        super().__init__(differing(f"topic {topic!r}", self.differences))


class InvalidTopic(LogError, InvalidArgument):
    """The name, partition count or a setting of a topic is invalid; the message says which, and what is allowed."""

    code = "log.invalid-topic"


class InvalidRecord(LogError, InvalidArgument):
    """A message or table does not fit the log's columns or limits. None of it was stored."""

    code = "log.invalid-record"


class SentRows(Protocol):
    """The methods of `pxrs.TableReceipt`, which is the type of `PartlySent.receipt`. This module cannot import that
    class."""

    @property
    def is_done(self) -> bool: ...

    def result(self, timeout: float | timedelta | None = None) -> Sequence[object]: ...


class PartlySent(LogError):
    """Only a part of a table was sent before an error. `receipt`, a TableReceipt, says which rows were sent; send the
    others. The receipt works in its own process only: in a copy of this error in another process it is text."""

    code = "log.partly-sent"

    def __init__(self, topic: str, rows: int, receipt: SentRows) -> None:
        self.topic, self.rows, self.receipt = topic, rows, receipt
        super().__init__(
            f"{topic}: only a part of a table of {counted(rows, 'row')} was sent; see the receipt of this error"
        )

    def state(self) -> dict[str, object]:
        receipt = self.receipt if isinstance(self.receipt, str) else repr(self.receipt)
        return {**super().state(), "receipt": receipt}

    def __copy__(self) -> Self:
        return restore(type(self), self.args, vars(self))


class OffsetOutOfRange(LogError):
    """The offset lies beyond the log's end. Read from an offset up to `end`."""

    code = "log.offset-out-of-range"

    def __init__(self, place: str, offset: int, end: int) -> None:
        self.place, self.offset, self.end = place, offset, end
        super().__init__(f"{place}: offset {offset} is beyond the end, {end}")


class OffsetTrimmed(LogError):
    """The offset predates retention. Resume at `first_offset`, or accept the loss explicitly."""

    code = "log.offset-trimmed"

    def __init__(self, place: str, offset: int, first_offset: int) -> None:
        self.place, self.offset, self.first_offset = place, offset, first_offset
        super().__init__(
            f"{place}: offset {offset} was removed by retention; the first remaining offset is {first_offset}"
        )


class DamagedFrame(LogError):
    """Stored bytes are damaged. Nothing is guessed or skipped: `file` and `position` name the place."""

    code = "log.damaged-frame"

    def __init__(self, file: str, position: int, what: str) -> None:
        self.file, self.position, self.what = file, position, what
        super().__init__(f"{file} at byte {position:,}: {what}")


class MisplacedFile(DamagedFrame):
    """A file of the log belongs to another topic or partition, as after a mistake in a restore. Nothing was changed.
    Put the right file in its place; `pxrs check` lists all misplaced files."""

    code = "log.misplaced-file"


class AppendFailed(LogError):
    """The append could not be made durable and is not part of the log. Try again: a retry is stored once."""

    code = "log.append-failed"


class AppendUnknown(AppendFailed):
    """The append may have been stored: a sync failed, or the reply to the append was lost. Resend the batch under the
    same origin (producer id, epoch, sequence): a batch that was stored is answered with its offset and not stored again
    (L4). A batch without an origin must not be resent: it would be stored twice."""

    code = "log.append-unknown"


class BufferFull(AppendFailed):
    """A producer's buffer stayed full for its `buffer_timeout`. Nothing of this message was sent; try again later."""

    code = "log.buffer-full"


class CopyFailed(LogError):
    """The copy of a topic cannot continue: another process is copying the same topics, or messages that it needs were
    removed. What was copied is kept. The text says what to do."""

    code = "log.copy-failed"


class LogBusy(AppendFailed):
    """Another process held the append lock for too long; it may be suspended. Try again, or check that process."""

    code = "log.busy"


class PartitionMoved(AppendFailed):
    """A broker of a cluster was asked for a partition that it does not serve, or does not serve yet; nothing was read
    or stored. A client looks up the partition's owner and retries by itself; it raises this only if no broker served
    the partition in time: see `pxrs cluster status`."""

    code = "log.partition-moved"


class ReadFailed(LogError):
    """The operating system could not read the log, or the server that keeps it did not answer. Nothing was changed; try
    again, or check the disk or the server."""

    code = "log.read-failed"


class UnknownProducer(LogError):
    """The log does not remember this producer's earlier batches, so the log cannot tell a retry from a new batch, and
    nothing was stored. Open a new producer.

    `stored` is (epoch, sequence) of the last batch that the log remembers of this producer; None if it remembers none.
    """

    code = "log.unknown-producer"

    def __init__(self, what: str, stored: tuple[int, int] | None = None) -> None:
        self.what, self.stored = what, stored
        super().__init__(what)


class SequenceGap(LogError):
    """A producer's batch arrived before the batch with the preceding sequence number. It was not stored; send the
    missing one first."""

    code = "log.sequence-gap"
