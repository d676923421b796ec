"""What an error from etcd proves about the call that met it.

The problem: gRPC reports a request that was never sent, one that was refused and one that took effect with its
reply lost through the same few codes, and only the first two may be tried again or reported as without effect (R5).

Invariant: an error proves that nothing happened only if it is listed here, because etcd gives that very answer before
it proposes the change, or decides it while applying. Everything else is LOST: nobody knows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pxrs.errors import (
    AccessDenied,
    CommitTooLarge,
    LeaseExpired,
    RegistryCorrupt,
    RegistryError,
    RegistryUnavailable,
    StorageFull,
)

_ANSWER = "etcdserver: "


class Proof(enum.Enum):
    """What is known after a failure, and so what may be done."""

    REFUSED = "nothing happened; another member, or a later moment, may do"
    LOGIN = "nothing happened; the token is not, or no longer, good"
    FINAL = "nothing happened, and the same call will fail again"
    FULL = "the store is full; the last commit that went in is told so too, after it has taken effect"
    LOST = "it may have happened, and may still"


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed call. `text` is etcd's or gRPC's own and holds no secret."""

    proof: Proof
    text: str
    kind: Callable[[str], RegistryError] = RegistryUnavailable

    @property
    def was_answered(self) -> bool:
        """Whether a member has answered, so that the connection to it works."""
        return self.proof is not Proof.LOST or self.text.startswith(_ANSWER)

    @property
    def is_final(self) -> bool:
        """Whether the same call, with the same token, would fail in the same way again."""
        return self.proof in (Proof.FINAL, Proof.LOGIN, Proof.FULL)

    def error(self, where: str) -> RegistryError:
        return self.kind(f"{where}: {self.text}")


class Compacted(RegistryUnavailable):
    """The revision that was asked for is no longer kept. Read at a newer one."""


def _corrupt(text: str) -> RegistryError:
    where, _, what = text.partition(f": {_ANSWER}")
    return RegistryCorrupt(where, what)


# Code, a part of the text, what it proves, what it becomes. The texts are etcd's API (rpctypes/error.go).
_KNOWN: tuple[tuple[str, str, Proof, Callable[[str], RegistryError]], ...] = (
    # The check of the request's metadata, before anything else.
    ("UNAVAILABLE", "etcdserver: no leader", Proof.REFUSED, RegistryUnavailable),
    ("UNAVAILABLE", "etcdserver: rpc not supported for learner", Proof.REFUSED, RegistryUnavailable),
    # Before the proposal: the member is behind with applying what was committed.
    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Proof.REFUSED, RegistryUnavailable),
    ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Proof.FULL, StorageFull),
    ("RESOURCE_EXHAUSTED", "larger than max", Proof.FINAL, CommitTooLarge),
    ("INVALID_ARGUMENT", "etcdserver: request is too large", Proof.FINAL, CommitTooLarge),
    ("INVALID_ARGUMENT", "etcdserver: too many operations", Proof.FINAL, CommitTooLarge),
    ("NOT_FOUND", "etcdserver: requested lease not found", Proof.FINAL, LeaseExpired),
    ("UNAUTHENTICATED", "etcdserver: invalid auth token", Proof.LOGIN, AccessDenied),
    # Authentication was switched on after the connection was made, or there is nobody to log in as.
    ("INVALID_ARGUMENT", "etcdserver: user name is empty", Proof.LOGIN, AccessDenied),
    ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Proof.LOGIN, AccessDenied),
    ("INVALID_ARGUMENT", "etcdserver: authentication failed", Proof.FINAL, AccessDenied),
    ("PERMISSION_DENIED", "etcdserver: permission denied", Proof.FINAL, AccessDenied),
    ("OUT_OF_RANGE", "required revision has been compacted", Proof.FINAL, Compacted),
    ("DATA_LOSS", "etcdserver: corrupt cluster", Proof.FINAL, _corrupt),
)


def fault_of(error: Any) -> Fault:
    """Judge a `grpc.RpcError`."""
    code, text = error.code().name, error.details() or "no details"
    for known_code, part, proof, kind in _KNOWN:
        if code == known_code and part in text:
            return Fault(proof, text, kind)
    return Fault(Proof.LOST, text)
