"""Tokens for the executors of one query: they can read some topics, or stage rows, and end with the query.

The driver of a Spark query has a token of its own, which executors must not get: it can do more, and it is long-lived.
So the driver asks the server for a *capability*: a text that says what it permits, signed by the server with a secret
of the query (HMAC-SHA256). The server keeps this secret in the registry under `secret_key(query)` (`issuing`). So:

- capabilities survive a restart of the server, and every server in front of the same registry accepts them;
- they end when the driver removes the secret, or loses the lease that it is kept with; nobody has to list those that
  are revoked;
- the secret never leaves the server: no client can read or write keys below `server/` (`keys.HIDDEN`).

A capability names the token of the driver, and is accepted only while that token is, and only for what that token
permits now (`within`). Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Final

from pxrs.errors import InvalidArgument
from pxrs.server.auth.permissions import Grant, Grants

BEGINNING: Final = "pxrsc_"
"""What every capability begins with; tokens of a tokens file begin otherwise."""
SECRETS: Final = "server/capabilities/"
SECRET_BYTES: Final = 32
ALL: Final = ("*",)
TOPICS_MAX: Final = 64
"""A capability is sent with each call, in metadata, which gRPC bounds to 8 kB."""
CHARACTERS_MAX: Final = 6_000
_ID: Final = re.compile(r"[0-9a-f]{32}")
_QUERY: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_CONTEXT: Final = b"pxrs capability 1\0"
"""Signed before the text, so that a signature under the same secret for another purpose is none of a capability."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What the executors of one query may do."""

    query: str
    """By which the server finds the secret: a new id for each secret."""
    token: str
    """The id of the driver's token in the tokens file; empty on a server without one."""
    until: float
    """Seconds since 1970, on the server's clock. The driver asks again before."""
    read: tuple[str, ...] = ()
    """The ids of topics whose ranges may be read; or ALL, for those that the driver's token may read."""
    stage: tuple[str, ...] = ()
    """The ids of topics for which rows may be staged; or ALL, for those that the driver's token may write to. What is
    staged has an effect only if the driver's manifest names it, by a name that the server has chosen."""

    def __post_init__(self) -> None:
        ids = (*self.read, *self.stage)
        if not _QUERY.fullmatch(self.query):
            raise InvalidArgument("the id of a query must be 1 to 200 letters, digits, '.', '_' or '-'")
        is_valid = all(each == ALL or all(_ID.fullmatch(id) for id in each) for each in (self.read, self.stage))
        if len(ids) > TOPICS_MAX or not is_valid:
            raise InvalidArgument(f"a capability must name at most {TOPICS_MAX:,} topic ids, or '*' alone")

    def grants_of(self, driver: Grants) -> Grants:
        """The permissions as `decisions` takes them. driver: those of the driver's token."""
        reads = (
            [Grant("topic-name", each, "read") for each in driver.patterns("topic", "read")]
            if self.read == ALL
            else [Grant("topic-id", each, "read") for each in self.read]
        )
        stages = (
            [Grant("stage-name", each, "write") for each in driver.patterns("topic", "write")]
            if self.stage == ALL
            else [Grant("stage-id", each, "write") for each in self.stage]
        )
        return Grants((*reads, *stages))


def secret_key(query: str) -> str:
    """The key of the registry that holds the secret of this query."""
    return f"{SECRETS}{query}"


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def sign(secret: bytes, capability: Capability) -> str:
    """The capability as a text that `verify` accepts with the same secret."""
    payload = json.dumps(asdict(capability), separators=(",", ":")).encode()
    return f"{BEGINNING}{_text(payload)}.{_text(_signature(secret, payload))}"


def claimed_query(text: str) -> str | None:
    """The query that the text says it is of, so that its secret can be looked up; nothing is verified yet. None if the
    text is no capability."""
    found = _parse(text)
    return None if found is None else found[0].query


def verify(secret: bytes, text: str, now: float) -> Capability | None:
    """The capability if the text was signed with this secret and its time is not over; None otherwise.

    A secret that is too short, such as a damaged one, verifies nothing."""
    found = _parse(text)
    if found is None or len(secret) != SECRET_BYTES:
        return None
    capability, payload, signature = found
    if not hmac.compare_digest(_signature(secret, payload), signature):
        return None
    return capability if now < capability.until else None


def within(capability: Capability, driver: Grants, topic_names: dict[str, str | None]) -> bool:
    """Whether the driver's token permits all that the capability does. Asked when it is signed, and when it is used.

    topic_names: the name of each topic by its id; None if there is no such topic any more."""
    reads, stages = ((() if each == ALL else each) for each in (capability.read, capability.stage))
    return all(driver.may("topic", topic_names.get(each), "read") for each in reads) and all(
        driver.may("topic", topic_names.get(each), "write") for each in stages
    )


def _parse(text: str) -> tuple[Capability, bytes, bytes] | None:
    if not text.startswith(BEGINNING) or len(text) > CHARACTERS_MAX:
        return None
    payload_text, _, signature_text = text.removeprefix(BEGINNING).partition(".")
    try:
        payload, signature = _data(payload_text), _data(signature_text)
        found: dict[str, Any] = json.loads(payload)
        capability = Capability(
            str(found["query"]),
            str(found["token"]),
            float(found["until"]),
            tuple(map(str, found["read"])),
            tuple(map(str, found["stage"])),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None  # InvalidArgument is a ValueError
    return capability, payload, signature


def _signature(secret: bytes, payload: bytes) -> bytes:
    return hmac.new(secret, _CONTEXT + payload, hashlib.sha256).digest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    """Raises ValueError."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error
