"""The access to the store under test, and functions that the tests share."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from pxrs import registry as registries_module
from pxrs.registry import Lease, Registry
from pxrs.testing.actor import Actor

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """How a suite reaches the store under test."""

    url: str
    ttl: float = 2.0
    """The shortest lease that the store grants and the tests can rely on."""
    expiry_slack: float = 10.0
    """How long after a lease's expiry its keys may still be seen, on a busy machine too."""
    versions_outlive_deletion: bool = True
    """Whether a version is not used again even after its key was deleted and made anew (not on ZooKeeper, R4)."""
    leases_many: int = 100
    """How many leases one handle takes in the test that counts its threads."""
    lease_threads: int = 0
    """How many threads a lease that is renewed may cost."""
    has_snapshots: bool = True
    """Whether the store gives all its keys at one moment (not through a server)."""
    opener: Callable[[str], Registry] = field(default=registries_module.open)

    def in_namespace(self, namespace: str) -> str:
        return f"{self.url}{'&' if '?' in self.url else '?'}namespace={namespace}"


class Store:
    """A backend in a namespace of one test; closes what the test opened."""

    def __init__(self, backend: Backend, stack: ExitStack) -> None:
        self.backend = backend
        self.namespace = f"t{uuid.uuid4().hex[:12]}"
        self.url = backend.in_namespace(self.namespace)
        self._stack = stack

    def open(self, namespace: str | None = None) -> Registry:
        url = self.url if namespace is None else self.backend.in_namespace(namespace)
        return self._stack.enter_context(self.backend.opener(url))

    def actor(self) -> Actor:
        return self._stack.enter_context(Actor(self.url))


def at_once(*actions: Callable[[], T]) -> list[T]:
    """Run the actions in threads that start together; their results, or the first error."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], T]) -> T:
        barrier.wait(30)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, action) for action in actions]]


def end_in_store(lease: Lease) -> None:
    """End a lease in the store without its holder noticing, as after an expiry."""
    lease.abandon()
    lease.stored.end()


class Fixtures:
    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("override `backend`: the backend under test")

    @pytest.fixture
    def store(self, backend: Backend) -> Iterator[Store]:
        with ExitStack() as stack:
            yield Store(backend, stack)

    @pytest.fixture
    def registry(self, store: Store) -> Registry:
        return store.open()


def quieten(watch: registries_module.Watch) -> None:
    """Consume the wakes that are under way, so that the next one belongs to the next change."""
    while watch.wait(0.1):
        continue
