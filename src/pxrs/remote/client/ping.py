"""Round trips to a server, for `pxrs ping`: over the control stream, which carries every small request of a client.

A server that does not accept the token of this client ends the control stream. Then the round trips are those of
gRPC's health check, which needs no token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc

from pxrs.errors import NotPermitted, RegistryUnavailable, Unauthenticated
from pxrs.remote.client.channel import Channel
from pxrs.remote.client.connection import Connection, acquire, release
from pxrs.remote.client.faults import Unanswered, text_of
from pxrs.remote.client.settings import Settings


@dataclass(frozen=True, slots=True)
class Pings:
    """What a server has answered."""

    round_trips_s: list[float]
    server: str | None = None
    """Its program and version; None if it did not accept this client, as are the next two."""
    instance: str | None = None
    """New with each start of the server."""
    wire: int | None = None
    """The version of the protocol."""
    refusal: str | None = None
    """Why the server does not accept this client; None if it does."""


def ping(settings: Settings, count: int) -> Pings:
    """Call the server so many times, one after the other. Raises RegistryUnavailable if an answer takes longer than
    `settings.timeout_s`; InvalidUrl and WireMismatch as every use of the address does; Unauthenticated if TLS itself
    fails for want of a certificate."""
    connection = acquire(settings)
    try:
        return _by_calls(connection, settings, count)
    except (Unauthenticated, NotPermitted) as refusal:
        return _by_health(settings, count, refusal)
    except Unanswered as error:
        raise RegistryUnavailable(f"{settings.shown}: {error}") from error
    finally:
        release(connection)


def _by_calls(connection: Connection, settings: Settings, count: int) -> Pings:
    connection.hello(settings.timeout_s)
    found, round_trips_s = {}, []
    for _ in range(count):
        began_at = time.perf_counter()
        found = connection.call("server.ping", {}, settings.timeout_s)
        round_trips_s.append(time.perf_counter() - began_at)
    return Pings(round_trips_s, str(found["server"]), str(found["instance"]), int(found["wire"]))


def _by_health(settings: Settings, count: int, refusal: Unauthenticated | NotPermitted) -> Pings:
    why = ""
    for target in settings.targets:
        channel = Channel(target, settings)
        try:
            channel.health(b"", timeout=settings.timeout_s)  # connects
            round_trips_s = []
            for _ in range(count):
                began_at = time.perf_counter()
                channel.health(b"", timeout=settings.timeout_s)
                round_trips_s.append(time.perf_counter() - began_at)
            return Pings(round_trips_s, refusal=str(refusal))
        except grpc.RpcError as failure:
            why = f"{target}: {text_of(failure)}"
        finally:
            channel.close()
    # A client without the certificate that the server wants cannot call anything.
    refusal.add_note(f"the health check fails too: {why}")
    raise refusal
