"""V4: whether `pxrs upkeep` is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pxrs
from pxrs.cli.upkeep import _readiness
from pxrs.errors import RegistryUnavailable
from pxrs.registry.file.registry import FileRegistry
from pxrs.testing.waiting import eventually
from pxrs.upkeep.schedule import LOOK_S


def unreachable(*arguments: object, **named: object) -> Any:
    raise RegistryUnavailable("no answer")


def test_v4_upkeep_is_not_ready_while_its_registry_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t")
        hub.start_upkeep()
        eventually(lambda: _readiness(hub.upkeep()).is_ok)
        assert hub.upkeep().role == "apart", "no process has needed a registry yet"
        hub.join_registry()
        hub.run_upkeep()
        eventually(lambda: _readiness(hub.upkeep()).is_ok and hub.upkeep().janitor)
        with monkeypatch.context() as patch:
            patch.setattr(FileRegistry, "_get", unreachable)
            found = _readiness(hub.upkeep())
            assert (found.is_ok, "no answer" in found.reason) == (False, True)
        hub.run_upkeep()
        eventually(lambda: _readiness(hub.upkeep()).is_ok)


def test_v4_upkeep_is_ready_again_soon_after_one_failed_look_and_stays_the_janitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The janitor looks every 15 s, and looked no sooner after a look that failed."""
    with pxrs.open(tmp_path / "data") as hub:
        hub.create_topic("t")
        hub.join_registry()
        hub.start_upkeep()
        eventually(lambda: hub.upkeep().role == "elected")
        since = hub.upkeep().since
        with monkeypatch.context() as patch:
            patch.setattr(FileRegistry, "_get", unreachable)
            hub.start_upkeep()  # look now
            eventually(lambda: hub.upkeep().role == "apart")
        eventually(lambda: _readiness(hub.upkeep()).is_ok, LOOK_S / 3)
        assert (hub.upkeep().role, hub.upkeep().since) == ("elected", since)
