"""`pxrs tail`: prints messages of a topic or registered source: the last ones, those from a place on, new ones.

Messages are read in rounds of a bounded size. The messages of one partition are printed in their order; those of
several partitions are ordered by time within a round, so that nothing waits for a partition that is slow.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pxrs.cli.completion import SourceName
from pxrs.cli.moments import FORMS, moment
from pxrs.cli.options import Json, MaybeAt, RegistryUrl, bytes_of, open_hub
from pxrs.errors import OffsetTrimmed
from pxrs.model import Message, microseconds_of

if TYPE_CHECKING:
    from pxrs.cli.message_format import Writer
    from pxrs.log.batch import Batch
    from pxrs.log.contract import Source

LAST_DEFAULT: Final = 10
WAIT_S: Final = 60.0
"""For how long one call waits for messages."""
KEY_SCAN_ROWS: Final = 10_000
"""How many offsets of each partition are searched first for the last messages with a key."""
WIDEN: Final = 4
"""By which factor the next search goes further back."""


def tail(
    topic: SourceName,
    at: MaybeAt = None,
    start: Annotated[
        str | None,
        typer.Option("--from", "-o", metavar="WHERE", help=f"Begin at earliest, latest, an offset, or {FORMS}."),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("-n", "--last", min=0, help=f"Print the last N messages; by default {LAST_DEFAULT}."),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new messages.")] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", "-c", min=1, help="Stop after this many messages; with -f alone, the next ones."),
    ] = None,
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition; may be repeated.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Only messages with this key.")] = None,
    registry: RegistryUrl = None,
    as_json: Json = False,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="A format such as '{partition}/{offset} {key}: {value}\\n'."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print the bytes of each value, followed by a line feed.")] = False,
) -> None:
    """Print the last messages of a topic or registered source, or those from a given position; with -f, also new ones
    as they arrive.

    On a terminal, control characters are printed escaped, such as \\x07, except with --raw. With --json, a key, a value
    or the value of a header that is not UTF-8 is printed in base64, as key_base64 or value_base64. `pxrs send --json`
    reads these lines.

    The fields of a FORMAT are topic, partition, offset, time, timestamp (microseconds), key, value, headers, key_bytes
    and value_bytes (-1 if there is no key or value). No line feed is added: end the format with \\n.
    """
    if start is not None and last is not None:
        raise typer.BadParameter("give either --from or --last")
    write, where = _writer(as_json, form, raw), None if start is None else _where(start)
    if last is None:
        last = LAST_DEFAULT if count is None else (0 if follow else count)
    with open_hub(at, registry) as hub:
        source = hub.readable(topic)
        reader = _Reader(source, _partitions(source, partition), None if key is None else bytes_of(key))
        rounds = reader.last(last) if where is None else reader.since(where)
        out = _Output(write, count)
        if out.takes(rounds) and follow:
            out.takes(reader.new())


def _writer(as_json: bool, form: str | None, raw: bool) -> Writer:
    from pxrs.cli import message_format

    if as_json + raw + (form is not None) > 1:
        raise typer.BadParameter("give only one of --json, --format and --raw")
    if form is not None:
        try:
            return message_format.by_format(form)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--format") from None
    return message_format.as_json if as_json else message_format.as_raw if raw else message_format.as_text


Where = str | int | datetime
"""`earliest`, `latest`, an offset of each partition, or a time."""


def _where(text: str) -> Where:
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal():
        return int(text)
    try:
        return moment(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r}: give earliest, latest, an offset, or {FORMS}", param_hint="--from"
        ) from None


def _partitions(source: Source, chosen: list[int] | None) -> list[int]:
    for number in chosen or ():
        if number >= source.partitions:
            raise typer.BadParameter(
                f"{source.name} has no partition {number}; it has 0 to {source.partitions - 1}",
                param_hint="--partition",
            )
    return sorted(set(chosen)) if chosen else list(range(source.partitions))


class _Output:
    """Prints messages, up to a number of them."""

    def __init__(self, write: Writer, count: int | None) -> None:
        self._write, self._left = write, count

    def takes(self, rounds: Iterable[Iterable[Message]]) -> bool:
        """Print the messages, a round at a time. Returns whether more may be printed."""
        if self._left == 0:
            return False
        for messages in rounds:
            lines = []
            for message in messages:
                lines.append(self._write(message))
                if self._left is not None and len(lines) == self._left:
                    break
            typer.echo(b"".join(lines), nl=False)
            if self._left is not None:
                self._left -= len(lines)
                if not self._left:
                    return False
        return True


class _Reader:
    """Reads partitions of a source, and knows up to where it has.

    key: only the messages with this key are handed out."""

    def __init__(self, source: Source, partitions: list[int], key: bytes | None) -> None:
        self._source, self._key = source, key
        self._bounds = source.bounds(partitions)
        self._positions = {number: found.end for number, found in self._bounds.items()}
        """The next offset of each partition; one that was read goes to the end, so that all get their turn."""
        self._asked = 0
        """Messages before this offset are left out, also of a partition that has not reached it yet."""

    def last(self, count: int) -> Iterator[Iterable[Message]]:
        """The last `count` messages before the end, as one round: the last ones of each partition, in their order. The
        latest of those that are the last of their partitions is taken first, so that partitions whose messages are in
        the order of time are merged in that order."""
        if count:
            order = self._order()
            backwards = [reversed(each) for each in self._last(count).values()]
            yield list(islice(heapq.merge(*backwards, key=lambda message: -order(message)), count))[::-1]

    def since(self, where: Where) -> Iterator[Iterable[Message]]:
        """The messages from this place on, up to the end as it was when this reader was made."""
        ends = dict(self._positions)
        self._positions = {number: self._begin(number, where) for number in ends}
        while before := {number: at for number, at in self._positions.items() if at < ends[number]}:
            found = self._round(before, ends, 0.0)
            if found is None:  # a table whose last rows are not final yet
                return
            yield found

    def new(self) -> Iterator[Iterable[Message]]:
        """The messages that arrive, for as long as any can."""
        while self._positions:
            yield self._round(self._positions, None, WAIT_S) or ()

    def _begin(self, partition: int, where: Where) -> int:
        start, end = self._bounds[partition]
        if where == "earliest":
            return start
        if where == "latest":
            return end
        if isinstance(where, datetime):
            return max(start, self._source.offset_at(partition, microseconds_of(where)))
        assert isinstance(where, int)
        self._asked = where
        if where < start and not self._source.has_gaps:
            self._tell_trimmed(partition, where, start)
        return min(max(start, where), end)

    def _tell_trimmed(self, partition: int, offset: int, start: int) -> None:
        if offset:  # offset 0 means the first message that is there
            gone = f"offsets {offset:,} to {start - 1:,} were removed by retention"
            typer.echo(f"{self._source.name}/{partition}: {gone}; it begins at {start:,}", err=True)

    def _round(
        self, positions: Mapping[int, int], ends: Mapping[int, int] | None, timeout: float
    ) -> Iterable[Message] | None:
        """What can be read at these positions, in the order of time; None if there is nothing."""
        fetched = self._source.fetch(positions, timeout=timeout)
        streams = []
        for number, found in sorted(fetched.items()):
            position = self._positions.pop(number)
            if isinstance(found.error, OffsetTrimmed):  # retention was faster
                self._tell_trimmed(number, position, found.error.first_offset)
                position = found.error.first_offset
            elif found.error is not None:
                raise found.error
            end = None if ends is None else ends[number]
            batches = [batch.within(max(position, self._asked), end) for batch in found.batches]
            streams.append(self._messages(number, batches))
            if found.batches:
                position = found.batches[-1].next_offset
            if not found.is_ended:
                self._positions[number] = position if end is None else min(position, end)
        return heapq.merge(*streams, key=self._order()) if fetched else None

    def _messages(self, partition: int, batches: Iterable[Batch]) -> Iterator[Message]:
        from pxrs.log.messages import messages_of

        for batch in batches:
            yield from messages_of(self._chosen(batch), self._source.name, partition)

    def _chosen(self, batch: Batch) -> Batch:
        """The batch, or those of its records that have the key."""
        return batch if self._key is None else with_key(batch, self._key)

    def _order(self) -> Callable[[Message], int]:
        # The ids of a table are in the order of arrival; a table need not have times.
        return (lambda message: message.offset) if self._source.has_gaps else (lambda message: message.timestamp)

    def _last(self, count: int) -> dict[int, deque[Message]]:
        """At least the last `count` messages of all partitions, if there are as many, by partition.

        Each step goes further back in the partitions that may still have one of them, because the offsets of a table
        have gaps, and because messages with another key do not count. Nothing is read twice."""
        found = {number: deque[Message]() for number in self._bounds}
        begins = {number: bounds.end for number, bounds in self._bounds.items()}
        oldest = dict.fromkeys(begins, 0)  # the time of the first message that was read of each partition
        back = count if self._key is None else max(count, KEY_SCAN_ROWS)
        while left := self._unfinished(found, begins, oldest, count):
            for number in left:
                end, bounds = begins[number], self._bounds[number]
                begins[number] = max(bounds.start, bounds.end - back)
                read = deque[Message](maxlen=count)
                for batch in self._batches(number, begins[number], end):
                    if batch.base_offset == begins[number] and batch.records.num_rows:
                        oldest[number] = batch.records.column("timestamp")[0].value
                    read.extend(self._messages(number, (batch,)))
                found[number].extendleft(reversed(read))
            back *= WIDEN
        return found

    def _batches(self, partition: int, start: int, end: int) -> Iterator[Batch]:
        """The batches from `start` on and before `end`, without those that retention removes meanwhile."""
        while start < end:
            try:
                for batch in self._source.batches(partition, start, end):
                    yield batch
                    start = batch.next_offset
                return
            except OffsetTrimmed as error:
                start = error.first_offset

    def _unfinished(
        self,
        found: Mapping[int, deque[Message]],
        begins: Mapping[int, int],
        oldest: Mapping[int, int],
        count: int,
    ) -> list[int]:
        """The partitions in which an earlier message may be one of the last `count`."""
        left = [number for number, at in begins.items() if at > self._bounds[number].start]
        have = sorted((message.timestamp for each in found.values() for message in each), reverse=True)
        if len(have) < count:
            return left
        if self._source.has_gaps:  # what was read has the highest ids
            return []
        # A partition that was read back to a message that is older than the oldest one to be shown is done.
        return [number for number in left if len(found[number]) < count and oldest[number] > have[count - 1]]


def with_key(batch: Batch, key: bytes) -> Batch:
    """The records of the batch that have this key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from pxrs.log.batch import Batch

    is_chosen = pc.fill_null(pc.equal(batch.records.column("key"), pa.scalar(key, pa.binary())), False)
    if batch.offsets is None:
        offsets = pc.add(pc.indices_nonzero(is_chosen).cast(pa.int64()), batch.base_offset)
    else:
        offsets = batch.offsets.filter(is_chosen)
    return Batch(batch.base_offset, batch.records.filter(is_chosen), offsets, batch.next_offset)
