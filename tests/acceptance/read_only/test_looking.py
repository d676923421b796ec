"""Who may only read a hub: everything that only looks works, everything else is refused whole (V5)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pxrs
import pxrs.registry.sql.registry
import pxrs.registry.sql.sqlite
from pxrs import registry as registries
from pxrs.cli.app import app
from pxrs.errors import AccessDenied, LogError, NoWritePermission, PxrsError
from tests.acceptance.read_only.reading import NOBODY, WRITES, as_root, look, picture, reading_only, send


@as_root
def test_v5_a_reader_imports_modules_that_only_root_may_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So this file passes in a checkout that other users may not enter."""
    checkout = place / "checkout"
    checkout.mkdir(mode=0o700)
    for name in ("imported_late", "imported_by_name"):
        (checkout / f"{name}.py").write_text("VALUE = 1")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(checkout))
    with reading_only(place):
        import imported_late  # type: ignore[import-not-found]

        assert imported_late.VALUE == importlib.import_module("imported_by_name").VALUE == 1
        assert os.geteuid() == NOBODY
        with pytest.raises(PermissionError):
            (checkout / "imported_late.py").read_text()


def test_v5_who_may_only_read_a_hub_looks_at_all_of_it_and_changes_nothing(data: Path) -> None:
    before = picture(data)
    with reading_only(data):
        look(data)
    assert picture(data) == before


COMMANDS = {
    "topic list": ["topic", "list"],
    "topic describe": ["topic", "describe", "orders"],
    "tail": ["tail", "orders", "-n", "3"],
    "group list": ["group", "list"],
    "group describe": ["group", "describe", "billing"],
    "queue list": ["queue", "list"],
    "queue describe": ["queue", "describe", "mail"],
    "queue depth": ["queue", "depth", "mail"],
    "queue peek": ["queue", "take", "mail", "--peek"],
    "queue dead": ["queue", "dead", "list", "mail"],
}


def test_v5_every_command_that_only_looks_works_for_who_may_only_read(data: Path) -> None:
    commands = {name: [*command, "--at", str(data), "--json"] for name, command in COMMANDS.items()}
    url = str(data / "registry")
    commands["registry scan"] = ["registry", "scan", url, "groups/", "--json"]
    commands["registry get"] = ["registry", "get", url, "queues/mail", "--json"]
    commands["check"] = ["check", str(data), "--json"]
    runner = CliRunner()
    expected = {name: runner.invoke(app, command, catch_exceptions=False).output for name, command in commands.items()}
    before = picture(data)
    with reading_only(data):
        found = {name: runner.invoke(app, command, catch_exceptions=False) for name, command in commands.items()}
    assert {name: result.output for name, result in found.items()} == expected
    assert {result.exit_code for result in found.values()} == {0}
    assert picture(data) == before


def test_v5_what_has_to_write_is_refused_before_anything_is_done(data: Path) -> None:
    with pxrs.open(data) as hub:
        hub.create_topic("short", retention=3600)
        send(hub, "short", 10)
        hub.join_registry()
    with reading_only(data), pxrs.open(data) as hub:
        before = picture(data)
        for name, write in WRITES.items():
            with pytest.raises(NoWritePermission) as caught:
                write(hub)
            assert isinstance(caught.value, LogError | AccessDenied), name
            assert str(data) in str(caught.value), f"{name}: where"
            assert f"uid {os.geteuid()}" in str(caught.value), f"{name}: who"
            assert "run it as" in str(caught.value), f"{name}: what to do"
            assert picture(data) == before, name


def test_v5_a_consumer_whose_registry_takes_writes_reads_a_log_that_does_not(data: Path, place: Path) -> None:
    """All that a group writes is in its registry; but who would record there which registry that is, is refused."""
    (place / "own").mkdir(mode=0o777)
    (place / "own").chmod(0o777)
    with reading_only(data), pxrs.open(data, place / "own") as hub:
        with pytest.raises(NoWritePermission, match="may not write to"):
            hub.consumer("orders", "audit")
        assert list((place / "own").iterdir()) == []
    with pxrs.open(data, place / "own") as hub:
        hub.create_topic("orders-dead")
        hub.join_registry()
    for folder in (place / "own").rglob("*"):
        if folder.is_dir():
            folder.chmod(0o777)
    with reading_only(data), pxrs.open(data, place / "own") as hub:
        with pytest.raises(NoWritePermission, match="may not write to"):
            hub.consumer("orders", "audit", on_error="dead-letter", dead_letters="orders-dead")
        with hub.consumer("orders", "audit", until="end", lease_ttl=10) as inbox:
            assert len(list(inbox)) == 10
    with pxrs.open(data, place / "own") as hub:
        assert hub.group("audit").describe().lag == 0


def test_v5_sparks_sink_is_refused_before_any_task_is_started(data: Path) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import BinaryType, StructType

    from pxrs.spark.options import WriteOptions
    from pxrs.spark.writer import BatchWriter

    columns = StructType().add("value", BinaryType())
    before = picture(data)
    with reading_only(data), pytest.raises(NoWritePermission, match="may not write to"):
        BatchWriter(WriteOptions(str(data), None, "orders"), columns, overwrite=False)
    assert picture(data) == before
    BatchWriter(WriteOptions(str(data), None, "orders"), columns, overwrite=False)


def test_v5_who_may_not_even_read_is_told_who_may(data: Path) -> None:
    data.chmod(0o000)
    looks: list[Callable[[], object]] = [
        lambda: pxrs.open(data).topics(),
        lambda: pxrs.open(data).groups(),
        lambda: registries.open(data / "registry").get("x"),
    ]
    try:
        with reading_only(data.parent):
            for look in looks:
                with pytest.raises(PxrsError, match="may not read") as caught:
                    look()
                assert str(data) in str(caught.value)
    finally:
        data.chmod(0o755)
