"""The requests of one simulated member: each is sent, applied and answered in steps, between which anything may happen.

    operation   request         next step
    set         None            `advance` sends it: refused at once (no living lease, `Rates.unavailable`), or
    None        not applied     the store applies it, or its sender stops waiting (`Rates.timeout`)
    None        applied         its reply arrives, or is lost (`Rates.lost_reply`)
    None        None            the procedure has ended, or waits for the caller to continue it

A write whose sender has stopped waiting goes to `Environment.late`: the store may still apply it.
"""

from __future__ import annotations

from typing import Any, Protocol

from pxrs.errors import LeaseExpired, OutcomeUnknown, RegistryError, RegistryUnavailable
from pxrs.registry.steps import Operation, Write
from pxrs.testing.simulator.environment import Environment
from pxrs.testing.simulator.store import Request


class Sender(Protocol):
    """A member, as far as its connection knows it."""

    incarnation: str
    lease: str

    @property
    def is_alive(self) -> bool: ...

    def advance(self, result: Any, error: RegistryError | None) -> None:
        """Continue the procedure with the result of its last operation, or with an error."""


class Connection:
    """The one request that a member has under way."""

    def __init__(self, environment: Environment, sender: Sender) -> None:
        self._environment, self._sender = environment, sender
        self.operation: Operation | None = None
        """Decided by the procedure, and not sent yet."""
        self.request: Request | None = None
        """Sent, and not answered yet."""

    @property
    def is_busy(self) -> bool:
        return self.operation is not None or self.request is not None

    @property
    def next_operation(self) -> Operation | None:
        """The operation that is about to be sent, or was sent."""
        return self.operation if self.request is None else self.request.operation

    @property
    def is_writing(self) -> bool:
        return isinstance(self.next_operation, Write)

    def step(self) -> None:
        """Take the next step of the request, or send the operation."""
        if self.request is not None:
            self._proceed(self.request)
        elif self.operation is not None:
            self._send(self.operation)

    def abandon(self) -> None:
        """The member has crashed or begins anew. An operation that it has decided on may have been sent."""
        environment, sender = self._environment, self._sender
        if self.operation is not None and environment.rng.random() < 0.5:
            operation = environment.altered(self.operation, sender)
            self.request = Request(operation, sender.incarnation, sender.lease)
        self.operation = None
        self._abandon_request()

    def _send(self, operation: Operation) -> None:
        environment, sender = self._environment, self._sender
        operation = environment.altered(operation, sender)
        request = Request(operation, sender.incarnation, sender.lease)
        needs_lease = isinstance(operation, Write) and (operation.is_leased or operation.ephemeral)
        self.operation = None
        if needs_lease and not sender.is_alive:
            sender.advance(None, LeaseExpired("the deadline has passed"))
        elif environment.strikes(self._rate(operation, environment.rates.unavailable)):
            sender.advance(None, RegistryUnavailable("no answer"))
        else:
            self.request = request
            if not environment.strikes(environment.rates.slow):
                self._proceed(request)

    def _rate(self, operation: Operation, rate: float) -> float:
        """How often this fails: the given rate for a write, that of unanswered reads for a read."""
        return rate if isinstance(operation, Write) else self._environment.rates.unanswered_read

    def _proceed(self, request: Request) -> None:
        environment = self._environment
        if environment.strikes(self._rate(request.operation, environment.rates.timeout)):
            self._stop_waiting(request)
        elif not request.is_applied:
            environment.apply(request)
            if request.is_applied and not environment.strikes(environment.rates.slow):
                self._take_reply(request)
        else:
            self._take_reply(request)

    def _take_reply(self, request: Request) -> None:
        if self._environment.strikes(self._rate(request.operation, self._environment.rates.lost_reply)):
            self._stop_waiting(request)
        else:
            self.request = None
            self._sender.advance(request.result, request.error)

    def _stop_waiting(self, request: Request) -> None:
        self._environment.note(self._sender, "gives up waiting", request.operation)
        self._abandon_request()
        if isinstance(request.operation, Write):
            self._sender.advance(None, OutcomeUnknown("no answer"))
        else:
            self._sender.advance(None, RegistryUnavailable("no answer"))

    def _abandon_request(self) -> None:
        """Forget the request. If it is a write that was not applied yet, the store may still apply it."""
        request, self.request = self.request, None
        if request is not None and not request.is_applied and isinstance(request.operation, Write):
            self._environment.late.append(request)
