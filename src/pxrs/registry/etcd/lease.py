"""Leases of etcd, each with a key of its own.

etcd's lease is a number that etcd renews, and ends with all keys that are bound to it. The lease's own key,
`/<namespace>/;leases/<id>`, is bound to it and so is there exactly as long as the lease lives in etcd. No key of a user
can have a `;`.

The secret: etcd's numbers have 63 bits, too few for a hash that nobody can invert. So the secret is the id and a random
token, and the lease's own key holds a hash of the token, which `attach` compares. Whoever reads that key, or ids in a
log, cannot attach.

The deadline is counted from before the request, less a tenth for clocks that run at different speeds. A leader that was
deposed and does not know it yet still answers renewals, which its successor does not know of: so a renewal counts only
if a linearizable read after it finds the same term.

etcd keeps the lease; this process holds nothing for it and sends nothing about it unasked.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from typing import Final, NamedTuple

from pyetcd import etcdrpc as rpc

from pxrs.clock import Clock
from pxrs.errors import LeaseExpired, RegistryUnavailable
from pxrs.registry.etcd.link import Link, Send
from pxrs.registry.lease import RENEWALS_PER_TTL, new_secret, not_attached

TRUSTED: Final = 0.9
"""The part of a lease that its holder counts on: etcd's clock may run faster than ours."""

_LEASES = b";leases/"
_NUMBER_MAX = 2**63 - 1


class EtcdLease:
    """One lease in etcd, see `registry.lease.StoredLease`."""

    def __init__(self, link: Link, root: bytes, lease_id: str, ttl: float, clock: Clock) -> None:
        self.id, self.ttl = lease_id, ttl
        self._link, self._root, self._clock = link, root, clock

    def renew(self) -> float:
        sent_at = self._clock.now()

        def renew(send: Send) -> float:
            answer = send("keep_alive", rpc.LeaseKeepAliveRequest(ID=int(self.id, 16)))
            read = send("range", rpc.RangeRequest(key=lease_key(self._root, self.id), keys_only=True))
            if answer.TTL <= 0 or not read.kvs:
                raise LeaseExpired(f"lease {self.id} has ended in etcd")
            if answer.header.raft_term != read.header.raft_term:
                raise RegistryUnavailable(
                    f"{self._link.where}: etcd's leader changed while lease {self.id} was renewed, so the renewal may "
                    "be lost: renew again"
                )
            return float(answer.TTL)

        timeout_s = min(self.ttl / RENEWALS_PER_TTL, self._link.timeout_s)
        return sent_at + TRUSTED * self._link.call(renew, repeatable=True, timeout_s=timeout_s)

    def end(self) -> None:
        request = rpc.LeaseRevokeRequest(ID=int(self.id, 16))
        try:
            self._link.call(
                lambda send: send("revoke", request), repeatable=True, timeout_s=min(self.ttl, self._link.timeout_s)
            )
        except LeaseExpired:
            return  # it had ended already

    def let_go(self) -> None:
        """Nothing is held for it."""


class Granted(NamedTuple):
    """What `begin` and `attach` return."""

    stored: EtcdLease
    secret: str
    deadline: float


def begin(link: Link, root: bytes, ttl: float, clock: Clock) -> Granted:
    """A new lease, with its key."""
    token = new_secret()

    def grant(send: Send) -> Granted:
        # A new number for every attempt: what a lost one has left behind has no keys of the user's, and expires.
        number = secrets.randbelow(_NUMBER_MAX) + 1
        lease_id, sent_at = f"{number:x}", clock.now()
        granted_s = float(send("grant", rpc.LeaseGrantRequest(ID=number, TTL=math.ceil(ttl))).TTL)
        put = rpc.PutRequest(key=lease_key(root, lease_id), value=_digest(token), lease=number)
        send("txn", rpc.TxnRequest(success=[rpc.RequestOp(request_put=put)]))
        stored = EtcdLease(link, root, lease_id, granted_s, clock)
        return Granted(stored, f"{lease_id}.{token}", sent_at + TRUSTED * granted_s)

    try:
        return link.call(grant, repeatable=True)
    except LeaseExpired:
        raise RegistryUnavailable(f"{link.where}: a lease of {ttl:g} s ended before it could be used") from None


def attach(link: Link, root: bytes, secret: str, clock: Clock) -> Granted:
    """The living lease of this secret, renewed once."""
    lease_id, _, token = secret.partition(".")
    try:
        number = int(lease_id, 16)
    except ValueError:
        raise not_attached() from None
    if not 0 < number <= _NUMBER_MAX or lease_id != f"{number:x}":
        raise not_attached()
    key = lease_key(root, lease_id)
    found = link.call(lambda send: send("range", rpc.RangeRequest(key=key)), repeatable=True).kvs
    if not found or not hmac.compare_digest(found[0].value, _digest(token)):
        raise not_attached()
    request = rpc.LeaseTimeToLiveRequest(ID=number)
    granted_s = float(link.call(lambda send: send("time_to_live", request), repeatable=True).grantedTTL)
    if granted_s <= 0:
        raise not_attached()  # it has ended just now
    stored = EtcdLease(link, root, lease_id, granted_s, clock)
    try:
        return Granted(stored, secret, stored.renew())
    except LeaseExpired:
        raise not_attached() from None


def lease_key(root: bytes, lease_id: str) -> bytes:
    """The key of a lease that is there exactly as long as the lease lives."""
    return root + _LEASES + lease_id.encode()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).hexdigest().encode()
