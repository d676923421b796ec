"""`drive`: a procedure's operations, performed on a registry; what they raise, raised in the procedure."""

from __future__ import annotations

import pytest

from pxrs import registry as registries
from pxrs.errors import Conflict, LeaseExpired
from pxrs.registry.contract import ABSENT
from pxrs.registry.steps import Get, Scan, Steps, Write, drive


def move(old: str, new: str) -> Steps[list[str]]:
    entry = yield Get(old)
    yield Write({old: entry.version, new: ABSENT}, {new: entry.value}, is_leased=False, delete=[old])
    return [entry.key for entry in (yield Scan("a/"))]


def test_a_procedure_reads_writes_and_returns() -> None:
    with registries.open("memory:") as registry:
        registry.commit(put={"a/1": b"x"})
        assert drive(move("a/1", "a/2"), registry) == ["a/2"]


def test_what_an_operation_raises_is_raised_in_the_procedure() -> None:
    def insist(key: str) -> Steps[int]:
        try:
            yield Write({key: 1_000}, {key: b"x"}, is_leased=False)
        except Conflict:
            return (yield Write({key: ABSENT}, {key: b"x"}, is_leased=False))[key]  # type: ignore[no-any-return]
        raise AssertionError("no key has version 1000")

    with registries.open("memory:") as registry:
        version = drive(insist("a"), registry)
        entry = registry.get("a")
        assert entry is not None
        assert entry.version == version


@pytest.mark.parametrize(
    ("write", "names_lease"),
    [
        (Write({}, {"a": b""}), True),
        (Write({}, {"a": b""}, is_leased=False), False),
        (Write({}, ephemeral={"a": b""}, is_leased=False), True),
    ],
    ids=["leased", "not leased", "ephemeral"],
)
def test_r3_a_leased_or_ephemeral_write_names_the_lease(write: Write, names_lease: bool) -> None:
    def put() -> Steps[None]:
        yield write

    with registries.open("memory:") as registry:
        lease = registry.lease(10)
        lease.close()
        if names_lease:
            with pytest.raises(LeaseExpired):
                drive(put(), registry, lease)
        else:
            drive(put(), registry, lease)
        assert (registry.get("a") is None) == names_lease
