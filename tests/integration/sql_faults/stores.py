"""SQL registries of the tests: their addresses, and calls that fail in time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import pytest

import pxrs.registry
from pxrs.registry.contract import Commit
from pxrs.registry.sql.commit import CommitPlan
from pxrs.registry.sql.registry import SqlRegistry
from pxrs.testing.proxy import Proxy
from pxrs.testing.servers import PostgresServer

LOCALE = "en_US.UTF-8"


def url_of(server: PostgresServer, place: Proxy | None = None, namespace: str = "", **options: object) -> str:
    """The server's address, or that of the proxy before it, in a namespace of its own unless one is given."""
    url = server.url if place is None else server.url.replace(f":{server.port}/", f":{place.port}/")
    options = {"namespace": namespace or f"t{uuid.uuid4().hex[:12]}", **options}
    return f"{url}?{'&'.join(f'{name}={value}' for name, value in options.items())}"


def open_sql(url: str) -> SqlRegistry:
    registry = pxrs.registry.open(url)
    assert isinstance(registry, SqlRegistry)
    return registry


def plan_of(registry: SqlRegistry, commit: Commit) -> CommitPlan:
    """What the registry would do, to be done step by step."""
    return CommitPlan(commit, registry._namespace, registry.statements)


def within(seconds: float, kind: type[Exception], call: Callable[[], object]) -> Exception:
    """The error of that kind that the call raises, in time."""
    began = time.monotonic()
    with pytest.raises(kind) as raised:
        call()
    assert time.monotonic() - began < seconds
    assert type(raised.value).__module__ == "pxrs.errors"
    return raised.value
