"""What a commit does in the database, decided without touching it.

The problem: two commits at READ COMMITTED, each of which expects a key that the other one writes, must not both pass,
also if that key is absent and so has no row to lock (R7).

So a commit locks everything that it names before it compares versions: first its lease, then every key, in key order,
one row with each statement. For a key that may be absent it first inserts a placeholder row; the database lets only one
transaction insert it, and the others wait. All commits lock in the same order, so they do not deadlock. A placeholder
is overwritten or deleted before the commit ends, or rolled back with it, so that no other transaction ever sees one.

    plan = CommitPlan(commit, namespace, statements)
    rows = run(plan.locks)            # in a transaction
    found = plan.judge(rows)          # may raise: Conflict, LeaseExpired, LeasesDue, TransactionAborted
    run(plan.writes(found))           # and commit

Most commits expect every key that they name, and find what they expect. Where one statement can lock, compare, write
and fail if it does not find that, such a commit is one statement a key, in the same order, all of them and their end
sent at once (R7). If one fails nothing has happened, and the plan above finds out why.

    rows = run(plan.direct)           # as one transaction, if there is such a plan
    plan.direct_versions(rows)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry.contract import ABSENT, Commit
from pxrs.registry.sql.database import Row, TransactionAborted
from pxrs.registry.sql.statements import ALIVE, Call, Statements

PAYLOAD_BYTES_MAX = 2000
"""The size of a NOTIFY payload. PostgreSQL allows 8,000 bytes, but every listener reads all payloads from one queue."""


VERSION_MAX = 2**63 - 1


class LeasesDue(Exception):
    """A key is bound to leases that are over by the database's clock, or that expire further ahead than their ttl. The
    caller ends the former and corrects the latter, by a write, and repeats the attempt."""

    def __init__(self, leases: Iterable[str]) -> None:
        self.leases = sorted(leases)
        super().__init__(*self.leases)


@dataclass(frozen=True, slots=True)
class Found:
    """The content of the locked rows. A key without a version has no row; version 0 is this commit's placeholder."""

    versions: dict[str, int]
    foreign_leases: frozenset[str]
    """Leases other than the commit's own that its keys are bound to. It is not known yet whether they are alive."""
    next_version: int | None


class CommitPlan:
    """One commit, as statements."""

    def __init__(self, commit: Commit, namespace: str, statements: Statements, channel: str = "") -> None:
        self._commit, self._namespace, self._statements, self._channel = commit, namespace, statements, channel
        self._keys = commit.keys
        self._lease = None if commit.lease is None else commit.lease.id
        self._needs_version = bool(commit.put or commit.ephemeral) or (
            bool(commit.delete) and statements.store_version is not None
        )
        self.direct = self._direct_calls()
        """One statement a key, or none if the commit cannot be made like that."""

    def direct_versions(self, results: Sequence[list[Row]]) -> dict[str, int]:
        """What the commit returns, if it was made directly: each statement has found what it expected."""
        of_keys = results[self._lease is not None :]
        found = {key: rows[0][0] for key, rows in zip(self._keys, of_keys, strict=False)}
        return {key: found[key] for key in self._commit.written}

    def _notification(self, changed: list[str]) -> list[Call]:
        """The notification for the listeners, if the commit sends one."""
        commit, statements = self._commit, self._statements
        if statements.notify is None or not self._channel or commit.quiet:
            return []
        ttl = commit.lease.ttl if commit.lease is not None and commit.ephemeral else 0.0
        return [Call(statements.notify, {"the_channel": self._channel, "the_payload": payload(changed, ttl)})]

    def judge(self, results: Sequence[list[Row]]) -> Found:
        """Decide on the rows that `locks` gave, in their order."""
        rows = iter(results)
        if self._lease is not None:
            self._check_lease(self._lease, next(rows))
        versions: dict[str, int] = {}
        foreign: set[str] = set()
        for key in self._keys:
            found = next(rows)
            if self._may_be_absent(key):
                found = next(rows)
                if not found:
                    raise TransactionAborted(f"{key} was deleted while its row was locked")
            for version, lease in found:
                versions[key] = version
                if lease is not None and lease != self._lease:
                    foreign.add(lease)
        next_version = next(rows)[0][0] if self._needs_version else None
        return Found(versions, frozenset(foreign), next_version)

    def check_versions(self, found: Found) -> None:
        """Raise Conflict with every key that is not as expected. Only once the foreign leases are known to live."""
        differing = [key for key, version in self._commit.expect.items() if found.versions.get(key, ABSENT) != version]
        if differing:
            raise Conflict(sorted(differing))

    def writes(self, found: Found) -> list[Call]:
        """The statements that change something; none if the commit only looked, or deletes what is not there."""
        commit, statements = self._commit, self._statements
        calls: list[Call] = []
        changed: list[str] = []
        for key in self._keys:
            values = {"the_namespace": self._namespace, "the_key": key}
            if key in commit.put or key in commit.ephemeral:
                bound = key in commit.ephemeral
                calls.append(
                    Call(
                        statements.write_entry,
                        {
                            **values,
                            "the_value": commit.ephemeral[key] if bound else commit.put[key],
                            "the_version": found.next_version,
                            "the_lease": self._lease if bound else None,
                        },
                    )
                )
                changed.append(key)
            elif key in commit.delete and found.versions.get(key, ABSENT) != ABSENT:
                calls.append(Call(statements.delete_entry, values))
                changed.append(key)
            elif found.versions.get(key) == ABSENT:
                calls.append(Call(statements.delete_entry, values))
        if not changed:
            return []
        if statements.store_version is not None:
            calls.append(Call(statements.store_version, {"the_version": str(found.next_version)}))
        return calls + self._notification(changed)

    def versions(self, found: Found) -> dict[str, int]:
        """What the commit returns."""
        if found.next_version is None:
            return {}
        return dict.fromkeys(self._commit.written, found.next_version)

    @property
    def locks(self) -> list[Call]:
        """What is run first, where the commit is not made directly."""
        statements = self._statements
        calls: list[Call] = []
        if self._lease is not None:
            calls.append(Call(statements.lock_lease, {"the_namespace": self._namespace, "the_lease": self._lease}))
        for key in self._keys:
            values = {"the_namespace": self._namespace, "the_key": key}
            if self._may_be_absent(key):
                calls.append(Call(statements.insert_placeholder, values))
            calls.append(Call(statements.lock_entry, values))
        if self._needs_version:
            calls.append(Call(statements.next_version, {}))
        return calls

    def _direct_calls(self) -> list[Call]:
        commit, direct = self._commit, self._statements.direct
        if direct is None or not commit.changed or commit.expect.keys() != set(self._keys):
            return []
        if max(commit.expect.values()) > VERSION_MAX:
            return []  # no key can have it, and the database would take it for a mistake
        calls: list[Call] = []
        if self._lease is not None:
            calls.append(Call(direct.lease, {"the_namespace": self._namespace, "the_lease": self._lease}))
        for key in self._keys:
            values: dict[str, Any] = {"the_namespace": self._namespace, "the_key": key}
            expected = commit.expect[key]
            if key in commit.put:
                values |= {"the_value": commit.put[key], "the_lease": None}
            elif key in commit.ephemeral:
                values |= {"the_value": commit.ephemeral[key], "the_lease": self._lease}
            elif expected == ABSENT:
                return []  # that takes a placeholder
            if expected == ABSENT:
                calls.append(Call(direct.insert, values))
                continue
            values["the_expected"] = expected
            if "the_value" in values:
                calls.append(Call(direct.update, values))
            else:
                calls.append(Call(direct.delete if key in commit.delete else direct.check, values))
        return calls + self._notification(commit.changed)

    def _may_be_absent(self, key: str) -> bool:
        """Whether the commit can pass with the key absent and depends on it, so that a row is needed to lock."""
        if key in self._commit.expect:
            return self._commit.expect[key] == ABSENT
        if key in self._commit.delete:
            # A deletion of one key alone needs no row to lock. With other keys in the commit, no other process may
            # create the key meanwhile.
            return len(self._keys) > 1
        return key in self._commit.put or key in self._commit.ephemeral

    def _check_lease(self, lease: str, rows: list[Row]) -> None:
        if not rows:
            raise LeaseExpired(f"lease {lease} has ended; take a new one and claim again")
        if rows[0][0] != ALIVE:
            raise LeasesDue([lease])


def payload(keys: Sequence[str], ttl: float = 0.0) -> str:
    """What a notification says: within how many milliseconds a lease may expire that it is about (0: none is), and
    the keys that changed, or if they are too many the folder that holds them all."""
    text = " ".join(keys)
    if len(text) > PAYLOAD_BYTES_MAX:
        text = common_folder(keys)
    return f"{int(ttl * 1000)} {text}"


def parse_payload(text: str) -> tuple[float, list[str]]:
    """Reads what `payload` has made: the lease's time to live in seconds, or 0 if the commit named no lease; and the
    keys that changed, or the folder that holds all of them (an empty name for all keys)."""
    ttl_ms, _, keys = text.partition(" ")
    return int(ttl_ms) / 1000, keys.split(" ")


def common_folder(keys: Sequence[str]) -> str:
    """The longest prefix of all the keys that is empty or ends in a slash."""
    first, last = min(keys), max(keys)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[: first.rfind("/", 0, length) + 1]
