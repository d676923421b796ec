"""Drivers that hear nothing of a commit, and registries that cannot be reached for a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pxrs.errors import (
    OutcomeUnknown,
    RegistryUnavailable,
)
from pxrs.publishing import manifest
from pxrs.publishing.manifest import Publisher
from pxrs.registry import outage
from tests.integration.publishing.driver import (
    QUERY,
    SEED,
    TASKS,
    Driver,
    Mutation,
    NotExact,
    Place,
    Places,
    Steps,
    Unheard,
    run_quietly,
    step_count,
)


def drive(place: Place, unheard: Callable[[Any], Any], **named: Any) -> Any:
    """Run a driver that has this registry, to its end or its error."""
    driver = Driver(place, **named)
    driver.registry = unheard(place.hub.registry)
    log = place.hub.topic("out").log
    driver.publisher = place.mutation.publisher(driver.registry, log, driver.staging)
    run_quietly(driver.run)
    return driver.registry


def try_lost_replies(places: Places, mutation: Mutation | None = None, is_one_hub: bool = True, tries: int = 1) -> None:
    """The reply to each commit is lost, and to so many more after it. Raises NotExact."""
    count = step_count(places(None, is_one_hub), "commit")
    for number, lands in itertools.product(range(1, count + 1), (0, 1, 2, None)):
        place = places(mutation, is_one_hub)
        drive(place, lambda inner: Unheard(inner, range(number, number + tries), lands))  # noqa: B023
        if (end := run_quietly(Driver(place, tasks=TASKS - 1, seed=SEED + 1).run)) is not None:
            raise NotExact(f"SEED={SEED}: no reply to {number}, lands {lands}, and it cannot go on: {end}") from end
        place.check(f"SEED={SEED}: no reply to {number}, lands {lands}")
        place.close()


def test_k1_a_commit_whose_reply_is_lost_may_have_landed_or_not_or_land_later(places: Places, is_one_hub: bool) -> None:
    try_lost_replies(places, is_one_hub=is_one_hub)


def test_k1_a_driver_that_gives_up_hearing_nothing_leaves_it_to_the_next(places: Places) -> None:
    try_lost_replies(places, tries=outage._TRIES_MAX)


def test_k1_a_manifest_may_land_while_the_next_driver_is_at_work(places: Places, is_one_hub: bool) -> None:
    count = step_count(places(None, is_one_hub), "get")
    for at in range(1, count + 1):
        place = places(None, is_one_hub)
        # The third commit is the second batch's manifest. All of its tries are on their way when the sender dies.
        late = drive(place, lambda inner: Unheard(inner, range(3, 100), 50))
        run_quietly(Driver(place, Steps(at, lambda: [late.tick() for _ in range(50)], "get"), seed=SEED + 1).run)  # noqa: B023
        Driver(place, seed=SEED + 2).run()
        place.check(f"SEED={SEED}: landed at the other one's call {at}")
        place.close()


class Away:
    """A registry of which every call is refused so many times before it comes through, for ever if None."""

    def __init__(self, inner: Any, refusals: int | None) -> None:
        self._inner, self._refusals = inner, refusals
        self._left = refusals
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("get", "scan", "commit"):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            if self._left is None or self._left > 0:
                self._left = None if self._left is None else self._left - 1
                self.refused += 1
                raise RegistryUnavailable("nobody answers")
            self._left = self._refusals
            return found(*arguments, **named)

        return call


def test_k1_a_registry_that_is_away_for_a_while_at_every_call_ends_no_batch(place: Place) -> None:
    away = drive(place, lambda inner: Away(inner, 2))
    place.check("no second driver was needed")
    assert away.refused > 20


def test_k1_a_registry_that_stays_away_ends_the_batch_and_the_next_driver_publishes_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PATIENCE_S", 0.05)
    driver = Driver(place)
    driver.claim()
    spans = driver.plan({})
    files = driver.stage(0, spans)
    feeds = driver.staging.feeds(QUERY, 0, driver.incarnation)
    publisher = Publisher(Away(place.hub.registry, None), place.hub.topic("out").log, driver.staging)
    began = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="nobody answers"):
        publisher.publish(QUERY, 0, files, [replace(feed, lease_s=0.3) for feed in feeds])
    assert time.monotonic() - began >= 0.3, "as long as the lease of the query lives"
    place.logs.plan(0, spans)
    Driver(place, seed=SEED + 1).run()
    place.check()


def test_k1_an_outcome_that_is_unknown_stays_so_when_the_registry_is_away_afterwards(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second try had no effect. The first one has, or will have."""
    monkeypatch.setattr(manifest, "PATIENCE_S", 0.0)
    driver = Driver(place)
    driver.claim()
    spans = driver.plan({})
    place.logs.plan(0, spans)
    files = driver.stage(0, spans)

    class Lost(Unheard):
        def commit(self, *arguments: Any, **named: Any) -> Any:
            if self._count:
                raise RegistryUnavailable("nobody answers")
            return super().commit(*arguments, **named)

    publisher = Publisher(Lost(place.hub.registry, [1], 0), place.hub.topic("out").log, driver.staging)
    with pytest.raises(OutcomeUnknown):
        publisher.publish(QUERY, 0, files, driver.staging.feeds(QUERY, 0, driver.incarnation))
    assert place.manifest() is not None
    Driver(place, seed=SEED + 1).run()
    place.check()
