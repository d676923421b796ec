"""V5: a backup that is made while a query publishes has all of each batch that its keys know, and nothing of others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pxrs import registry as registries
from pxrs.backup.making import make_backup
from pxrs.backup.restoring import restore, verify
from pxrs.log.directory.check import check
from tests.acceptance.backup_steps import Between
from tests.integration.publishing.driver import (
    SEED,
    SOAK,
    Held,
    Mutation,
    Place,
    Places,
    step_count,
    take_over,
)


class RestoredPlace(Place):
    """The hub that was made of a backup, without Spark's checkpoint location."""

    def __init__(self, folder: Path, sent: list[tuple[bytes, bytes]]) -> None:
        self.url, self.sent = str(folder), sent
        self.mutation, self.is_one_hub, self.has_gone_on = Mutation(), True, False
        self.open()


def restored(place: Place, registry: Any, folder: Path) -> RestoredPlace:
    """Back the place up while `registry` is asked, and restore it."""
    home = place.hub.check_registry()
    make_backup(Path(place.url), home.hub if home else "", registry, "", folder / "b", "", lambda progress: None)
    manifest = verify(folder / "b", lambda progress: None)
    with registries.open(folder / "hub" / "registry") as store:
        restore(folder / "b", manifest, folder / "hub", store, "", lambda progress: None)
    return RestoredPlace(folder / "hub", place.sent)


@pytest.mark.parametrize("goes_on", ["before the registry is copied", "before the log is copied", "after the backup"])
def test_v5_a_backup_may_be_made_at_every_step_of_a_query(goes_on: str, places: Places, tmp_path: Path) -> None:
    """The driver is held at a step. It goes on to its end when the ends were read for the first time and the registry
    was not copied, when the registry was copied and the log was not, or when the backup is made. In the restored hub
    another member finishes the manifests and goes on at the group's checkpoints."""
    count = step_count(places())
    steps = range(1, count + 1)
    for step in steps if SOAK else random.Random(SEED).sample(steps, 2 if goes_on.startswith("before the reg") else 6):
        place = places()
        held = Held(place, step)

        moments = {"before the registry is copied": "before", "before the log is copied": "after"}
        hooks = {moments[goes_on]: held.go_on} if goes_on in moments else {}
        copy = restored(place, Between(place.hub.registry, **hooks), tmp_path / str(step))
        held.go_on()
        assert held.error is None
        place.check(f"SEED={SEED}: the copied hub, held at {step}")
        assert [found.findings for found in check(Path(copy.url)) if found.findings] == []
        take_over(copy)
        copy.check(f"SEED={SEED}: held at {step}")
        manifest = copy.manifest()
        assert manifest is None or manifest.is_published, f"SEED={SEED}: held at {step}, and cannot be finished"
        copy.close()
        place.close()
