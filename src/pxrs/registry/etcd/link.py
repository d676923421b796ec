"""The way to an etcd cluster: one connection at a time, to one of its members, and another when that one fails.

The problem: a call must end within its bound whatever the network does, must not be sent twice if it might take
effect twice (R5), and must find the member that works while another one is down, silent or cut off from its peers.

Invariants:
- A call is sent only on a connection that is known to have been good a moment ago. A call that is not `repeatable` is
  sent a second time only if the first answer proves that nothing happened (`faults`).
- Every wait is bounded by the time of the call, and no lock is held while a request is under way. Only connecting is
  serialized; a call that waits for another one to connect uses the connection that the other one made.

On failure: the next member is tried, in the order of the address and again from the first, with growing pauses, until
the time of the call is over. A connection that is given up is closed when the last call on it has ended; the watches on
it end then, and are opened on the next connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from pyetcd import etcdrpc as rpc

from pxrs.errors import AccessDenied, Closed, OutcomeUnknown, RegistryUnavailable
from pxrs.registry.address import REFUSALS_MIN
from pxrs.registry.etcd.connection import HAS_LEADER, Certificates, Connection, Metadata
from pxrs.registry.etcd.faults import Fault, Proof, fault_of
from pxrs.registry.limit import seconds_left

T = TypeVar("T")
Send = Callable[[str, Any], Any]
"""Sends one request to the connected member and returns the answer: `send("range", RangeRequest(...))`."""

DIAL_S_MAX = 1.5
"""After this, a member that neither accepts nor refuses is passed over."""
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5
ATTEMPT_S_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Login:
    """A user of etcd's own authentication."""

    user: str
    password: str = field(repr=False)


class Link:
    """Sends calls to a cluster. Threads share it."""

    def __init__(
        self,
        where: str,
        targets: Sequence[str],
        *,
        certificates: Certificates | None,
        login: Login | None,
        timeout_s: float,
        refused_s: float = math.inf,
    ) -> None:
        """where: names the cluster in messages. refused_s: how long the first connection is tried while every member
        refuses it."""
        self.timeout_s, self._refused_s = timeout_s, refused_s
        self._was_connected = False
        self.where = where
        self._targets = tuple(targets)
        self._certificates, self._login = certificates, login
        self._closed = threading.Event()
        self._dialling = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._current: Connection | None = None
        self._target = 0
        self._retired: set[Connection] = set()
        self._calls: Counter[Connection] = Counter()
        # None: log in first.
        self._metadata: Metadata | None = None if login else HAS_LEADER
        self._why = "no answer yet"

    def call(self, step: Callable[[Send], T], *, repeatable: bool, timeout_s: float | None = None) -> T:
        """Perform a step of one or more requests on one connection, and all of it again after a failure that allows it.

        repeatable: the step may be performed twice. If it is not, OutcomeUnknown means that it may have taken effect;
        any other error, that it has not."""
        until = time.monotonic() + seconds_left(self.timeout_s if timeout_s is None else timeout_s)
        pause_s = PAUSE_S_MIN
        may_log_in = self._login is not None
        while True:
            connection, metadata = self._take(until)
            try:
                return step(_sender(connection, metadata, until, repeatable))
            except grpc.RpcError as error:
                fault = fault_of(error)
            except ValueError:
                self._check_open()  # a closed channel refuses calls with a ValueError
                raise
            finally:
                self._give_back(connection)
            self.learn(fault, connection, metadata)
            if fault.proof is Proof.LOST and not repeatable:
                raise OutcomeUnknown(f"{self.where}: no reply from {connection.target}: {fault.text}")
            if fault.proof is Proof.LOGIN and may_log_in:
                may_log_in = False
                continue
            if fault.is_final or time.monotonic() + pause_s >= until:
                raise fault.error(f"{self.where}: {connection.target}")
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def connect(self) -> tuple[Connection, Metadata]:
        """A connection for a stream, which ends when the connection is given up."""
        connection, metadata = self._take(time.monotonic() + self.timeout_s)
        self._give_back(connection)
        return connection, metadata

    def learn(self, fault: Fault, connection: Connection, metadata: Metadata) -> None:
        """After a failure: let later calls log in again, or use another member."""
        if fault.proof is Proof.LOGIN:
            with self._lock:
                if self._login is not None and self._metadata == metadata:
                    self._metadata = None
        elif not fault.is_final and (len(self._targets) > 1 or not fault.was_answered):
            self._give_up(connection)

    def close(self) -> None:
        """End every call and stream."""
        self._closed.set()
        with self._lock:
            connections = {*self._retired, *([self._current] if self._current else [])}
            self._current = None
            self._retired.clear()
        for connection in connections:
            connection.close()

    # The connection in use.

    def _take(self, until: float) -> tuple[Connection, Metadata]:
        return self._take_current() or self._dial(until)

    def _take_current(self) -> tuple[Connection, Metadata] | None:
        with self._lock:
            connection, metadata = self._current, self._metadata
            if connection is None or metadata is None or not connection.is_sound:
                return None
            self._calls[connection] += 1
            return connection, metadata

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            self._calls[connection] -= 1
        self._close_if_done(connection)

    def _give_up(self, connection: Connection) -> None:
        with self._lock:
            if self._current is connection:
                self._current = None
                self._target = (self._target + 1) % len(self._targets)
                self._retired.add(connection)
        self._close_if_done(connection)

    def _close_if_done(self, connection: Connection) -> None:
        with self._lock:
            if connection not in self._retired or self._calls[connection]:
                return
            self._retired.remove(connection)
            del self._calls[connection]
        connection.close()

    # Dialling.

    def _dial(self, until: float) -> tuple[Connection, Metadata]:
        """Take a new connection, or the current one with a new token. Nothing has been sent when this fails."""
        if not self._dialling.acquire(timeout=_seconds_to(until)):
            raise RegistryUnavailable(f"{self.where}: {self._why}")
        try:
            return self._dial_in_turn(until)
        finally:
            self._dialling.release()

    def _dial_in_turn(self, until: float) -> tuple[Connection, Metadata]:
        pause_s, failures, refused = PAUSE_S_MIN, 0, 0
        began = time.monotonic()
        while True:
            try:
                connection = self._connect(until)
                if self._metadata is None:
                    self._log_in(connection, until)
            except grpc.RpcError as error:
                self._why = fault_of(error).text
                refused = refused + 1 if "Connection refused" in self._why else 0
            except ValueError as error:
                self._check_open()
                self._why = str(error)  # another call has given the connection up
            taken = self._take_current()
            if taken is not None:
                return taken
            if time.monotonic() + pause_s >= until:
                raise RegistryUnavailable(f"{self.where}: {self._why}")
            is_refused = refused >= max(REFUSALS_MIN, len(self._targets)) and not self._was_connected
            if is_refused and time.monotonic() - began >= self._refused_s:
                tried = f"at each of {refused} attempts; is etcd running there?"
                raise RegistryUnavailable(f"{self.where}: {self._why}, {tried}")
            failures += 1
            if failures % len(self._targets) == 0:
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _connect(self, until: float) -> Connection:
        current = self._current
        if current is not None:
            if current.is_sound:
                return current
            self._give_up(current)
        connection = Connection(self._targets[self._target], self._certificates)
        with self._lock:
            self._current = connection
        try:
            self._check_open()
            connection.prove(min(DIAL_S_MAX, _seconds_to(until)))
        except BaseException:
            self._give_up(connection)
            raise
        self._was_connected = True
        return connection

    def _log_in(self, connection: Connection, until: float) -> None:
        assert self._login is not None
        request = rpc.AuthenticateRequest(name=self._login.user, password=self._login.password)
        metadata = HAS_LEADER
        try:
            answer = connection.authenticate(request, timeout=_seconds_to(until), metadata=HAS_LEADER)
            metadata += (("token", answer.token),)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise AccessDenied(f"{self.where}: the user or the password was refused") from None
            # Otherwise authentication is off on the server, and no user is needed.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                self._give_up(connection)
                raise
        with self._lock:
            self._metadata = metadata

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Closed(f"the registry {self.where} was closed")


def _seconds_to(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _sender(connection: Connection, metadata: Metadata, until: float, repeatable: bool) -> Send:
    """The time limit of a request: a repeatable one leaves time for another member, any other has all the time there
    is."""
    if repeatable:
        now = time.monotonic()
        until = min(until, now + max((until - now) / 2, ATTEMPT_S_MIN))

    def send(method: str, request: Any) -> Any:
        return getattr(connection, method)(request, timeout=_seconds_to(until), metadata=metadata)

    return send
