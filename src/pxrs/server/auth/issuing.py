"""Makes capabilities for the executors of Spark's queries, and recognises them.

    server/capabilities/<id>    the secret of a capability, when it ends, and the token of the driver that asked for it
    server/capabilities/token-<token>
                                the secret of those that a driver with this token asks for without a lease, only to read

Nothing tells when a batch job that reads is over, so its capability ends with its time, and needs no secret of its own:
a registry must not fill up with keys of jobs. Other ids begin with the time, so that the oldest keys come first: each
new capability removes some that have ended.

A server remembers the secrets that it has used, so that it need not ask the registry for each call of an executor, and
looks about once a second whether they are still there (`refresh`): after that time, nothing can be read or staged for a
query that has ended.
"""

from __future__ import annotations

import math
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from pxrs.errors import Conflict, RegistryError
from pxrs.registry.contract import ABSENT, Registry
from pxrs.registry.lease import Lease
from pxrs.server.auth import capabilities
from pxrs.server.auth.capabilities import SECRET_BYTES, SECRETS, Capability

KNOWN_MAX: Final = 1_000
"""How many secrets a server remembers. Others are read again when they are needed."""
SWEPT_MAX: Final = 20
"""How many keys are looked at for each new capability."""
_OF_TOKEN: Final = "token-"
_UNTIL: Final = struct.Struct("<d")


class _Record(NamedTuple):
    secret: bytes
    until: float
    token: str

    def dump(self) -> bytes:
        return self.secret + _UNTIL.pack(self.until) + self.token.encode()

    @classmethod
    def load(cls, value: bytes) -> _Record:
        """A damaged one has no secret, so that it verifies nothing."""
        if len(value) < SECRET_BYTES + _UNTIL.size:
            return cls(b"", 0.0, "")
        (until,) = _UNTIL.unpack_from(value, SECRET_BYTES)
        return cls(value[:SECRET_BYTES], until, value[SECRET_BYTES + _UNTIL.size :].decode(errors="replace"))


class Issuer:
    """Threads share it."""

    def __init__(self, registry: Callable[[], Registry], wall_time: Callable[[], float] = time.time) -> None:
        """registry: that of the hub."""
        self._registry, self._wall_time = registry, wall_time
        self._lock = threading.Lock()
        self._known: OrderedDict[str, bytes] = OrderedDict()
        """By id: the secrets that were in the registry when it was last asked."""

    def create(self, asked: Capability, seconds: float, lease: Lease | None) -> tuple[str, str]:
        """The id and the text of a new capability that permits what was asked for. Its secret is kept until the time is
        over; with a lease, no longer than that lives. Raises what the registry raises."""
        now = self._wall_time()
        capability = replace(asked, query=f"{int(now):010x}-{secrets.token_hex(16)}", until=now + seconds)
        if lease is None and not asked.stage:
            capability = replace(capability, query=f"{_OF_TOKEN}{asked.token}")
            return capability.query, capabilities.sign(self._secret_of(capability), capability)
        secret = capabilities.new_secret()
        key = capabilities.secret_key(capability.query)
        value = {key: _Record(secret, capability.until, capability.token).dump()}
        self._sweep(now)
        if lease is None:
            self._registry().commit({key: ABSENT}, value)
        else:
            self._registry().commit({key: ABSENT}, ephemeral=value, lease=lease)
        return capability.query, capabilities.sign(secret, capability)

    def _secret_of(self, capability: Capability) -> bytes:
        """The secret that all such capabilities of one token share, made by whoever asks first."""
        key, registry = capabilities.secret_key(capability.query), self._registry()
        if (entry := registry.get(key)) is None:
            secret = capabilities.new_secret()
            try:
                registry.commit({key: ABSENT}, {key: _Record(secret, math.inf, capability.token).dump()})
                return secret
            except Conflict:
                entry = registry.get(key)
        return b"" if entry is None else _Record.load(entry.value).secret

    def _sweep(self, now: float) -> None:
        entries = self._registry().scan(SECRETS, None, SWEPT_MAX)
        if ended := [entry.key for entry in entries if _Record.load(entry.value).until < now]:
            self._registry().commit(delete=ended)

    def end(self, query: str, token: str) -> None:
        """End a capability that was made for this token; without effect if there is none, or if others share its
        secret."""
        if query.startswith(_OF_TOKEN):
            return
        key = capabilities.secret_key(query)
        entry = self._registry().get(key)
        if entry is not None and _Record.load(entry.value).token == token:
            self._registry().commit(delete=[key])
        with self._lock:
            self._known.pop(query, None)

    def find(self, text: str) -> Capability | None:
        """The capability that the text is, if it is signed and has not ended. May ask the registry."""
        query = capabilities.claimed_query(text)
        if query is None:
            return None
        with self._lock:
            secret = self._known.get(query)
        if secret is None:
            entry = self._registry().get(capabilities.secret_key(query))
            if entry is None:
                return None
            secret = _Record.load(entry.value).secret
        found = capabilities.verify(secret, text, self._wall_time())
        if found is not None:
            with self._lock:
                self._known[query] = secret
                if len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
        return found

    def is_known(self, text: str) -> bool:
        """Whether `find` need not ask the registry."""
        query = capabilities.claimed_query(text)
        with self._lock:
            return query is None or query in self._known

    def is_valid(self, capability: Capability) -> bool:
        with self._lock:
            is_there = capability.query in self._known
        return is_there and self._wall_time() < capability.until

    def refresh(self) -> None:
        """Forget the secrets that are not in the registry any more. If that cannot be asked, they stay."""
        with self._lock:
            known = list(self._known)
        if not known:
            return
        try:
            there = {entry.key for entry in self._registry().scan(SECRETS)}
        except RegistryError:
            return
        gone = [query for query in known if capabilities.secret_key(query) not in there]
        with self._lock:
            for query in gone:
                self._known.pop(query, None)
