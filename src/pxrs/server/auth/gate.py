"""The gate of a server: who calls, and whether the call is permitted.

The server calls `identify` once for each call of gRPC, `check` before each call has any effect (W4), and `refresh`
about once a second. After each `refresh` it ends the streams whose caller is not valid any more (W5): the token was
revoked or has expired; or, if it is still accepted, it permits something else now, so that the client connects again
and has open what is permitted now.

Threads share a gate. `identify` and `is_valid` never block. `refresh` reads a file. `check`, `scan` and `shown` may ask
the log and the registry for the name that belongs to an id, if the call names keys of the registry, or a topic by a
capability: call them on the thread that makes the call.

A refusal tells nothing about what exists: it has the same text whatever the call names. A tokens file that cannot be
read any more changes nothing: the tokens that were known last stay valid, and the failure is logged once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pxrs.errors import Conflict, InvalidArgument, NotPermitted, PxrsError, Unauthenticated, UnknownTopic
from pxrs.registry.lease import Lease
from pxrs.registry.values import Entry
from pxrs.remote import wire
from pxrs.server.auth import tokens
from pxrs.server.auth.capabilities import BEGINNING as CAPABILITY
from pxrs.server.auth.capabilities import CHARACTERS_MAX, Capability, within
from pxrs.server.auth.decisions import is_permitted
from pxrs.server.auth.issuing import Issuer
from pxrs.server.auth.keys import Names, Scan, may_read, scan_visible
from pxrs.server.auth.permissions import Grant, Grants
from pxrs.server.auth.tokens import Token, Tokens

_logger = logging.getLogger(__name__)

COMMON_NAME: Final = "x509_common_name"
ALTERNATIVE_NAME: Final = "x509_subject_alternative_name"
"""How gRPC names the identities of a client certificate in `auth_context`."""
TOKEN_CHARACTERS_MAX: Final = CHARACTERS_MAX
_EVERYTHING: Final = Grants((Grant("hub", "", "admin"),))

Identities = Mapping[str, Sequence[bytes]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. It has no secret, so that it may be logged."""

    grants: Grants
    token: Token | None = None
    """The entry of the tokens file; None on a server without one. That of the driver, for an executor."""
    capability: Capability | None = None
    """What an executor of Spark has shown; None for every other caller."""

    @property
    def who(self) -> str | None:
        """The caller as the event log names it; None on a server without a tokens file."""
        return None if self.token is None else f"token {self.token.id}"

    def __str__(self) -> str:
        who = "anyone" if self.token is None else f"{self.token.name} ({self.token.id})"
        return who if self.capability is None else f"an executor of {who}"


ANYONE: Final = Caller(_EVERYTHING)
"""Every caller of a server without a tokens file. Keys that only the server writes are kept from it too."""


class Gate:
    """Decides by a tokens file. Without one, everything is permitted to everybody."""

    def __init__(
        self,
        path: str | None,
        names: Names,
        wall_time: Callable[[], float] = time.time,
        issuer: Issuer | None = None,
    ) -> None:
        """path: the tokens file. Raises InvalidArgument if it cannot be read. issuer: recognises capabilities; without
        it, there are none."""
        self._path, self._names, self._wall_time, self._issuer = path, names, wall_time, issuer
        self._lock = threading.Lock()
        """Held while the file is read, so that an older content never follows a newer one."""
        self._read: tokens.Identity | None = None
        """The identity of the file whose content is `_tokens`."""
        self._tokens = Tokens.of(())
        self._problem: str | None = None
        if path is not None:
            self._read, self._tokens = tokens.read(path)

    @property
    def is_open(self) -> bool:
        """Whether everything is permitted to everybody."""
        return self._path is None

    @property
    def problem(self) -> str | None:
        """Why the tokens file cannot be read now; None if it can be, or if there is none."""
        return self._problem

    def refresh(self) -> bool:
        """Read the tokens file again if it has changed; whether it has. Blocks as long as the file system does."""
        if self._path is None:
            return False
        if self._issuer is not None:
            self._issuer.refresh()
        with self._lock:
            try:
                if tokens.identity_of(os.stat(self._path)) == self._read:
                    problem, is_changed = None, False
                else:
                    self._read, self._tokens = tokens.read(self._path)
                    problem, is_changed = None, True
            except (InvalidArgument, OSError) as error:
                # Never fail open, and do not lock out everybody because of a typing mistake.
                problem, is_changed = str(error), False
            if problem is not None and problem != self._problem:
                _logger.error("the tokens file was not reloaded, so the tokens read last stay valid: %s", problem)
            elif problem is None and self._problem is not None:
                _logger.info("the tokens file %s can be read again", self._path)
            self._problem = problem
        return is_changed

    def identify(self, metadata: Mapping[str, str | bytes], identities: Identities | None = None) -> Caller:
        """Who calls. A token in the metadata takes precedence over the client certificate. Raises Unauthenticated.

        metadata:   of the call, with names in lower case.
        identities: those of a client certificate that the server has verified, as gRPC's `auth_context` has them."""
        if self._path is None:
            return ANYONE
        known = self._tokens
        token = _token_in(metadata)
        if token is None:
            found = _by_certificate(known, identities or {})
        elif token.startswith(CAPABILITY):
            return self._executor(token)
        else:
            found = known.find(token)
        if found is None or found.is_expired(self._wall_time()):
            raise unauthenticated()
        return Caller(found.grants, found)

    def may_block(self, metadata: Mapping[str, str | bytes]) -> bool:
        """Whether `identify` asks the registry: the caller shows a capability that this server has not seen."""
        token = _token_in(metadata)
        is_capability = self._path is not None and token is not None and token.startswith(CAPABILITY)
        return is_capability and self._issuer is not None and not self._issuer.is_known(token or "")

    def _executor(self, text: str) -> Caller:
        """An executor of Spark, with the permissions of its capability, as far as the driver's token has them."""
        capability = None if self._issuer is None else self._issuer.find(text)
        driver = None if capability is None else self._tokens.by_id.get(capability.token)
        if capability is None or driver is None or driver.is_expired(self._wall_time()):
            raise unauthenticated()
        known = self._names.once()
        names = {id: known.topic(id) for id in (*capability.read, *capability.stage)}
        if not within(capability, driver.grants, names):
            raise unauthenticated()
        return Caller(capability.grants_of(driver.grants), driver, capability)

    def issue(
        self, caller: Caller, read: Sequence[str], stage: Sequence[str], seconds: float, lease: Lease | None
    ) -> tuple[str, str] | None:
        """The id and the text of a new capability for the executors of this caller; None on a server without a tokens
        file, which needs none. Raises NotPermitted if the caller itself may not do what it asks for. May block."""
        if caller.token is None or self._issuer is None:
            return None
        asked = Capability("asked", caller.token.id, 0.0, tuple(read), tuple(stage))
        known = self._names.once()
        names = {id: known.topic(id) for id in (*read, *stage)}
        if caller.capability is not None or not within(asked, caller.grants, names):
            raise _not_permitted("capability.create")
        return self._issuer.create(asked, seconds, lease)

    def end(self, caller: Caller, query: str) -> None:
        """End a capability of this caller. May block."""
        if caller.token is not None and self._issuer is not None and caller.capability is None:
            self._issuer.end(query, caller.token.id)

    def is_accepted(self, caller: Caller) -> bool:
        """Whether the caller's token is still accepted, with whatever permissions."""
        return self._grants(caller) is not None

    def _grants(self, caller: Caller) -> Grants | None:
        """What the caller may do now, as far as the file was read; None if its token is not accepted any more."""
        if caller.token is None:
            return caller.grants if self._path is None else None
        now = self._tokens.by_id.get(caller.token.id)
        if now is None or now.is_expired(self._wall_time()):
            return None
        is_same = (now.sha256, now.certificate) == (caller.token.sha256, caller.token.certificate)
        if caller.capability is None:
            return now.grants if is_same else None
        # What an executor may do was computed from the driver's permissions, which may have changed.
        is_alive = self._issuer is not None and self._issuer.is_valid(caller.capability)
        return caller.grants if is_same and is_alive and now.grants == caller.token.grants else None

    def is_valid(self, caller: Caller) -> bool:
        """Whether the caller's token is still accepted, with the same permissions. If it is not, what the caller has
        open is to be ended."""
        return self._grants(caller) == caller.grants

    def check(self, caller: Caller, call: str, arguments: Mapping[str, Any]) -> None:
        """Raises NotPermitted; Unauthenticated if the token is not valid any more; InvalidArgument if what the decision
        needs is not there."""
        grants = self._grants(caller)
        if grants is None:
            raise unauthenticated()
        if not is_permitted(grants, self._names.once(), call, arguments):
            raise _not_permitted(call)

    def topics(self, caller: Caller, topics: Iterable[T], name: Callable[[T], str]) -> list[T]:
        """Those of the topics that the caller may see. name: the name of one."""
        return [topic for topic in topics if caller.grants.may("topic", name(topic), "describe")]

    def scan(
        self, caller: Caller, scan: Scan, prefix: str, after: str | None = None, limit: int | None = None
    ) -> list[Entry]:
        """The entries of a scan that `check` has permitted, without those that the caller may not read. Fewer than
        `limit` means that there are no more."""
        return scan_visible(caller.grants, self._names.once(), scan, prefix, after, limit)

    def shown(self, caller: Caller, error: PxrsError) -> PxrsError:
        """The error as the caller may see it: without keys that it may not read and topics that it may not see."""
        if type(error) is Conflict:
            return visible_conflict(error, caller.grants, self._names.once())
        if type(error) is UnknownTopic:
            visible = [name for name in error.choices if caller.grants.may("topic", name, "describe")]
            return error if len(visible) == len(error.choices) else UnknownTopic(error.topic, visible)
        return error


def _token_in(metadata: Mapping[str, str | bytes]) -> str | None:
    """The token that a caller shows; empty if it is too long, or shown in another way than as a bearer's."""
    sent = metadata.get(wire.TOKEN_METADATA)
    if sent is None:
        return None
    scheme, _, token = (sent if isinstance(sent, str) else sent.decode(errors="replace")).strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" and len(token) <= TOKEN_CHARACTERS_MAX else ""


def _not_permitted(call: str) -> NotPermitted:
    return NotPermitted(
        f"the token does not permit {call[:100]!r} with these arguments; nothing was done. Ask the operator of the "
        "server for a grant: docs/serve.md lists what each call needs"
    )


def visible_conflict(conflict: Conflict, grants: Grants, names: Names) -> Conflict:
    """The conflict with the keys that the caller may read."""
    visible = [key for key in conflict.keys if may_read(grants, names, key)]
    return conflict if len(visible) == len(conflict.keys) else Conflict(visible)


def _by_certificate(known: Tokens, identities: Identities) -> Token | None:
    for kind, field in (("SAN", ALTERNATIVE_NAME), ("CN", COMMON_NAME)):
        for each in identities.get(field, ()):
            found = known.by_certificate.get(f"{kind}={each.decode(errors='replace')}")
            if found is not None:
                return found
    return None


def unauthenticated() -> Unauthenticated:
    """The same error whether a token is missing, wrong, revoked or expired."""
    return Unauthenticated(
        "the server did not accept the token or certificate of this client, or got none; nothing was done. Use a valid "
        "token: `pxrs token create` creates one on the host that has the server's tokens file"
    )
