"""The tables of schemes: those of pxrs, and those that installed packages add by entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

import pxrs
from pxrs import address, registry
from pxrs.address import LazyRegistry, open_log
from pxrs.errors import Closed, InvalidUrl
from pxrs.hub import Hub
from pxrs.log.memory import MemoryLog
from pxrs.registry.memory import MemoryRegistry

PACKAGE = """
from pxrs.log.memory import MemoryLog
from pxrs.registry.memory import MemoryRegistry


class Shelf(MemoryLog):
    def __init__(self, url, own_registry):
        super().__init__()
        self.url, self.own_registry = url, own_registry


def open_log(address):
    return Shelf(address.text, "cupboard:")


def open_lone_log(address):
    return Shelf(address.text, None)


def open_registry(address):
    address.refuse_unknown_options(("colour",))
    return MemoryRegistry()
"""
POINTS = """[pxrs.logs]
shelf = cupboards:open_log
lone = cupboards:open_lone_log
memory = cupboards:open_lone_log
[pxrs.registries]
cupboard = cupboards:open_registry
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds the schemes shelf: and lone: for logs, cupboard: for registries."""
    (tmp_path / "cupboards.py").write_text(PACKAGE)
    info = tmp_path / "cupboards-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupboards\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_an_installed_package_adds_a_log_and_a_registry() -> None:
    with pxrs.open("shelf:top", "cupboard:?colour=red") as hub:
        assert hub.url == "shelf:top"
        hub.create_topic("t")
        hub.create_queue("q")
    with pxrs.open("shelf:top") as hub:
        assert hub.registry_address == "cupboard:", "the registry that the log brings, if none is given"
        assert hub.queues() == []


@pytest.mark.usefixtures("package")
def test_a_log_without_a_registry_of_its_own_needs_one_to_be_given() -> None:
    with pytest.raises(
        InvalidUrl, match=r"lone:x has no registry of its own: pass the registry's address as registry="
    ):
        pxrs.open("lone:x")
    pxrs.open("lone:x", "memory:").close()


@pytest.mark.usefixtures("package")
def test_errors_name_the_added_schemes_and_no_package_replaces_one_of_pxrs() -> None:
    with pytest.raises(
        InvalidUrl, match=r"unknown scheme 'kafka'; give a directory, pxrs://HOST:PORT or memory:, lone:, shelf:"
    ):
        pxrs.open("kafka://h")
    with pytest.raises(InvalidUrl, match=r"registry: unknown scheme 'kafka'; choose from memory, .*, cupboard"):
        pxrs.open("memory:", "kafka://h")
    with pytest.raises(InvalidUrl, match=r"cupboard: stores no messages"):
        pxrs.open("cupboard:")
    assert type(open_log("memory:")) is MemoryLog
    assert address.log_schemes() == ["memory", "file", "pxrs", "lone", "shelf"]
    assert registry.schemes()[-1] == "cupboard"


def test_a_hub_is_a_log_and_a_registry_and_closes_both() -> None:
    log, store = MemoryLog(), MemoryRegistry()
    with Hub(log, store) as hub:
        assert hub.registry is store
        hub.create_topic("t")
    for call in (log.topics, lambda: store.get("key"), lambda: hub.registry):
        with pytest.raises(Closed):
            call()


def test_a_registry_is_opened_by_its_first_use_and_never_after_close(tmp_path: Path) -> None:
    lazy = LazyRegistry(tmp_path / "registry")
    assert lazy.is_missing
    assert not (tmp_path / "registry").exists(), "to ask must not make it"
    assert lazy.get() is lazy.get()
    assert not lazy.is_missing
    lazy.close()
    lazy.close()
    with pytest.raises(Closed):
        lazy.get()
    unused = LazyRegistry(f"sqlite:///{tmp_path}/absent.db")
    assert unused.is_missing
    unused.close()
    with pytest.raises(Closed):
        unused.get()
    assert not (tmp_path / "absent.db").exists()
