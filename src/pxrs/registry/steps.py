"""Procedures over a registry as generators: they yield one operation at a time and are sent its result.

A procedure holds no registry, no thread and no clock. `drive` performs its operations on a real registry. The simulator
(`pxrs.testing.simulator`) performs them on a simulated one, and so can stop a procedure between any two operations,
lose a reply, apply a write after its sender has stopped waiting for it, or never go on with the procedure, as if its
process had died. The code that decides is the same in both cases.

    def increment(key: str) -> Steps[int]:
        entry = yield Get(key)
        expect = {key: ABSENT if entry is None else entry.version}
        yield Write(expect, {key: b"..."}, is_leased=False)     # raises Conflict here if the key has changed

    drive(increment("counter"), registry)

What the operation raises is raised in the generator, at its `yield`: the procedure decides what an error means. After
`OutcomeUnknown` the write may have been applied, or may still be (R5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from pxrs.registry.contract import Registry
from pxrs.registry.lease import Lease


class Get(NamedTuple):
    """`Registry.get`: its result is an `Entry`, or None."""

    key: str


class Scan(NamedTuple):
    """`Registry.scan`: its result is a list of entries."""

    prefix: str
    after: str | None = None
    limit: int | None = None


class Write(NamedTuple):
    """`Registry.commit`: its result is the new version of each key written."""

    expect: Mapping[str, int]
    put: Mapping[str, bytes] = {}
    ephemeral: Mapping[str, bytes] = {}
    is_leased: bool = True
    """Whether the commit names the lease of whoever runs the procedure, so that it is refused once the lease has ended.
    A commit with `ephemeral` keys names the lease in any case."""
    is_quiet: bool = False
    delete: Collection[str] = ()


Operation = Get | Scan | Write
T = TypeVar("T")
Steps = Generator[Operation, Any, T]
"""A procedure that returns a T."""


def drive(
    steps: Steps[T],
    registry: Registry,
    lease: Lease | None = None,
    *,
    commit: Callable[[Write], dict[str, int]] | None = None,
) -> T:
    """Run a procedure to its end on a registry.

    lease:  named by the writes with `is_leased` or with ephemeral keys.
    commit: makes the writes in place of `Registry.commit`, such as a function that merges the writes of several
            threads into one commit."""
    try:
        operation = next(steps)
        while True:
            try:
                if commit is not None and isinstance(operation, Write):
                    result = commit(operation)
                else:
                    result = perform(operation, registry, lease)
            except Exception as error:  # noqa: BLE001 - raised in the procedure, which decides what the error means
                operation = steps.throw(error)
            else:
                operation = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def perform(operation: Operation, registry: Registry, lease: Lease | None = None) -> Any:
    """Make the one call of the registry that the operation stands for, and return what the call returned."""
    if isinstance(operation, Write):
        expect, put, ephemeral, is_leased, is_quiet, delete = operation
        named = lease if is_leased or ephemeral else None
        return registry.commit(expect, put, ephemeral=ephemeral, lease=named, delete=delete, quiet=is_quiet)
    if isinstance(operation, Get):
        return registry.get(operation.key)
    return registry.scan(operation.prefix, operation.after, operation.limit)
