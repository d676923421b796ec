"""The staging contract through a server, and what only a server can do wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("grpc")

import pxrs
from pxrs.hub import Hub
from pxrs.publishing.staging.contract import Staging
from pxrs.publishing.staging.served import ServedStaging
from pxrs.remote.client.transfers import connected
from pxrs.server.serving import serving
from pxrs.testing.staging_contract import OTHER, TOPIC, StagingContract


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub in a directory, with the topics of the contract."""
    with pxrs.open(tmp_path / "hub", upkeep=False) as hub:
        for topic in (TOPIC, replace(TOPIC, name="returns", id=OTHER)):
            hub.log.create_topic(topic)
        yield hub


@pytest.fixture
def place(hub: Hub) -> Iterator[ServedStaging]:
    """The staging place of that hub, as a client sees it. The connection stays open for the whole test."""
    with serving(hub) as url, connected(url, None):
        yield ServedStaging(url)


def make_older(hub: Hub, seconds: float) -> None:
    folder = Path(hub.url, "staging")
    for path in [folder, *folder.rglob("*")]:
        found = path.stat()
        os.utime(path, (found.st_atime - seconds, found.st_mtime - seconds))


class TestServed(StagingContract):
    @pytest.fixture
    def staging(self, hub: Hub, place: ServedStaging) -> Staging:
        self.hub = hub
        return place

    def make_older(self, staging: Staging, seconds: float) -> None:
        make_older(self.hub, seconds)
