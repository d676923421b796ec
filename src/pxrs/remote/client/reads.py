"""Reads: one stream of `DoGet` brings what there is at many positions at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
import pyarrow as pa

from pxrs.errors import ReadFailed
from pxrs.log.batch import NO_RECORDS, SCHEMA, Batch
from pxrs.log.contract import Fetched
from pxrs.remote import flight, wire
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.faults import Unanswered, error_in, is_lasting, text_of

_NO_OFFSETS: Final = pa.array([], pa.int64())


def fetch(channel: Channel, ticket: Mapping[str, Any], timeout_s: float) -> dict[int, Fetched]:
    """What there is at the positions of the ticket, by partition. Raises the error of pxrs with which the server has
    ended the stream; ReadFailed if trying again will not help; Unanswered."""
    batches: dict[int, list[Batch]] = {}
    errors: dict[int, Fetched] = {}
    call: Any = None
    try:
        call = channel.get(flight.ticket(wire.dumps(ticket)), timeout=timeout_s, metadata=channel.metadata)
        for data in call:
            message = flight.read_flight_data(data)
            if not len(message.app_metadata):
                continue  # the schema, which is the same for every topic
            about = wire.loads(message.app_metadata)
            partition = int(about["partition"])
            if "error" in about:
                errors[partition] = Fetched(error=wire.error_of(about["error"]))  # type: ignore[arg-type]
            else:
                batches.setdefault(partition, []).append(read_batch(message, about))
    except grpc.RpcError as failure:
        error = error_in(failure)
        if error is not None:
            raise error from None
        text = f"{channel.target}: {text_of(failure)}"
        raise (ReadFailed(text) if is_lasting(failure) else Unanswered(text, was_sent=True)) from None
    except (flight.MalformedMessage, KeyError, TypeError, pa.ArrowException) as error:
        raise ReadFailed(f"{channel.target}: malformed message from the server: {error}") from error
    except ValueError as error:  # the channel is closed
        raise Unanswered(f"{channel.target}: {error}", was_sent=False) from None
    finally:
        if call is not None:
            call.cancel()
    return {partition: Fetched(tuple(found)) for partition, found in batches.items()} | errors


def read_batch(message: flight.FlightData, about: Mapping[str, Any]) -> Batch:
    """One batch of a stream; about: its `app_metadata`. Raises what a message that cannot be read raises."""
    offset = int(about["offset"])
    if not len(message.header):  # a gap: the offsets before `next` belong to no message
        return Batch(offset, NO_RECORDS, _NO_OFFSETS, int(about["next"]))
    # The records are copied once, to where they are aligned, and keep nothing else of the message.
    return Batch(offset, pa.ipc.read_record_batch(flight.encapsulated(message.header, message.body), SCHEMA))
