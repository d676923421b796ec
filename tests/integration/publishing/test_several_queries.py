"""Several queries, several sources of a query, several runs of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import (
    BatchRefused,
    PartitionLost,
)
from pxrs.publishing.feed import Feed
from pxrs.publishing.planning import Span
from pxrs.publishing.records import published_spans
from pxrs.registry.identity import fingerprint
from tests.integration.publishing.driver import (
    QUERY,
    SEED,
    Crash,
    Driver,
    Place,
    Places,
    Steps,
    batch_of,
    crash,
    fed_batch,
    state,
    step_count,
    table_of,
    values,
)


def test_k3_what_a_dead_member_left_is_published_before_what_follows(place: Place) -> None:
    """Also by one who has been at work for long."""
    second = Driver(place)
    second.clean_up()
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        fed_batch(first, "first", 0, (0, 5))
    assert place.arrived() == 0
    assert place.checkpoints()[0] == 5
    second.claim()
    fed_batch(second, "second", 0, (5, 10))
    assert values(place) == [int(value) for _, value in place.rows(0, 0, 10)]
    assert not place.staged()


def test_k1_what_a_query_left_in_other_partitions_is_published_by_one_at_work(place: Place) -> None:
    second = Driver(place)
    second.clean_up()
    first = Driver(place, Steps(1, crash, "commit"))
    first.claim()
    with pytest.raises(Crash):
        fed_batch(first, "first", 0, (0, 5))
    second.claim()
    fed_batch(second, "second", 0, (0, 5), 1)
    assert place.arrived() == 5, "somebody may still be at it"
    fed_batch(second, "second", 1, (5, 10), 1)
    assert place.arrived() == 15
    assert not place.staged()


def test_k2_the_same_batch_with_other_input_is_refused_also_if_its_group_is_elsewhere(places: Places) -> None:
    place = places(None, is_one_hub=False)
    driver = Driver(place)
    driver.claim()
    batch_of(driver, 0, (0, 5))
    with pytest.raises(BatchRefused, match="repeats batch 0 with other input"):
        batch_of(driver, 0, (0, 8))


def test_k3_what_an_earlier_run_has_announced_counts_no_more(place: Place) -> None:
    first, second = Driver(place), Driver(place)
    first.claim()
    first.stage(0, first.plan({}))
    (torn,) = Path(place.url, "staging", "feeds", QUERY).iterdir()
    second.claim()
    second.stage(0, second.plan({}))
    torn.write_text("")  # renamed, and not yet written when the power went
    (feed,) = second.staging.feeds(QUERY, 0, second.incarnation)
    assert feed.fences == second.fences
    batch_of(second, 0, (0, 5), (0, 5))
    assert place.arrived() == 10
    assert not place.staged()


def test_k3_two_sources_of_a_query_may_share_a_group_and_both_are_checkpointed(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    registry = fingerprint(place.hub.registry)
    spans = [{0: Span(1, 0, 5)}, {1: Span(1, 0, 3)}]
    feeds = [
        Feed("g", place.source.id, f"m{at}", registry, each, {at: driver.fences[at]}, True)
        for at, each in enumerate(spans)
    ]
    for feed in feeds:
        driver.staging.announce(QUERY, 0, "run", feed)
    found = driver.staging.feeds(QUERY, 0, "run")
    assert found == feeds
    name = driver.staging.stage(driver.topic, QUERY, 0, 0, [table_of(place.sent[:8])]).name
    with pytest.raises(PartitionLost):
        driver.publisher.publish(QUERY, 0, [name], [*found, replace(feeds[0], incarnation="before it moved")])
    assert state(place) == (0, {0: 0, 1: 0}, None)
    driver.publisher.publish(QUERY, 0, [name], found)
    assert place.checkpoints() == {0: 5, 1: 3}


def test_k1_a_batch_that_is_repeated_without_reading_is_finished_from_what_was_staged_first(places: Places) -> None:
    """The driver died at each step of its first batch; the next one knows from the manifest that it need not read."""
    count = step_count(places())
    finished = 0
    for at in range(1, count + 1):
        place = places()
        driver = Driver(place, Steps(at, crash))
        with suppress(Crash):
            driver.run()
        batch, spans, is_finished = place.logs.last()
        named = {(place.source.id, number): span for number, span in spans.items()}
        found = published_spans(place.hub.registry, "g", named)
        assert set(found) in (set(), set(named)), "all or nothing"
        if found and not is_finished:
            finished += 1
            again = Driver(place, seed=SEED + 1)
            again.claim()
            feed = Feed("g", place.source.id, again.incarnation, fingerprint(place.hub.registry), {}, {}, False)
            again.staging.announce(QUERY, batch, again.incarnation, feed)
            feeds = again.staging.feeds(QUERY, batch, again.incarnation)
            again.publisher.publish(QUERY, batch, [], feeds)
            place.logs.finish(batch)
        Driver(place, seed=SEED + 2).run()
        place.check(f"SEED={SEED}: died at step {at}")
        place.close()
    assert finished > 5


def test_k2_a_batch_that_reads_and_makes_nothing_may_be_repeated_with_something(place: Place) -> None:
    driver = Driver(place)
    driver.claim()
    nothing = Feed("g", place.source.id, driver.incarnation, fingerprint(place.hub.registry), {}, {}, True)
    driver.publisher.publish(QUERY, 0, [], [nothing])
    batch_of(driver, 0, (0, 5))
    assert place.arrived() == 5


def test_k3_one_registry_is_known_by_whatever_name(place: Place) -> None:
    link = Path(place.url).with_name("link")
    link.symlink_to(place.url)
    store = f"sqlite:///{place.url}/r.db"
    names = [(place.url, None), (link, None), (link, f"{place.url}/registry"), (place.url, store)]
    ids = []
    for url, registry in [*names, (place.url, f"{store}?namespace=other")]:
        with pxrs.open(url, registry=registry) as hub:
            ids.append(fingerprint(hub.registry))
    link.unlink()
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids)) == 3
