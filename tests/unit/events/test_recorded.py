"""Which events a group, a consumer, a queue and upkeep record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pxrs
from pxrs import ConsumeTimes, Message
from pxrs.errors import PartitionLost, PartitionsPaused
from pxrs.events.names import KINDS
from pxrs.hub import Hub
from pxrs.testing.waiting import aside, eventually


@pytest.fixture
def hub() -> Iterator[Hub]:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=2)
        yield hub
        for event in (*hub.events(), *hub.audit()):
            assert {*event.fields} <= {*KINDS[event.name].fields}, event


def send(hub: Hub, count: int = 1, partition: int = 0) -> None:
    with hub.producer("t") as out:
        for number in range(count):
            out.send(str(number), partition=partition)


def found(hub: Hub, name: str) -> list[dict[str, Any]]:
    return [dict(event.fields) for event in hub.events() if event.name == name]


def fail(message: Message) -> None:
    raise ValueError(f"cannot handle {message.value!r}")


def test_a_member_that_joins_claims_releases_and_leaves(hub: Hub) -> None:
    with hub.consumer("t", "g", name="anna") as inbox:
        eventually(lambda: inbox.assignment == [0, 1])
    names = [event.name for event in hub.events(group="g")]
    assert names == [
        *("member.joined", "group.assigned", "partition.claimed", "partition.claimed"),
        *("partition.released", "partition.released", "member.left"),
    ]
    (joined,) = found(hub, "member.joined")
    assert (joined["member"], joined["topics"]) == ("anna", ["t"])
    assert [each["epoch"] for each in found(hub, "partition.claimed")] == [1, 1]
    assert list(hub.events(group="other")) == []
    assert len(list(hub.events(topic="t"))) == 5  # those of partitions, and that of the member that joined


def test_a_partition_that_is_handed_over_and_one_that_is_taken_over_name_both_members(hub: Hub) -> None:
    with hub.consumer("t", "g", name="anna") as anna:
        eventually(lambda: anna.assignment == [0, 1])
        with hub.consumer("t", "g", name="bert") as bert:
            eventually(lambda: bert.assignment == [1])
            (handed,) = found(hub, "partition.handed_over")
            assert (handed["from_member"], handed["member"], handed["epoch"]) == ("anna", "bert", 3)
            die(bert)
            eventually(lambda: anna.assignment == [0, 1])
            (taken,) = found(hub, "partition.taken_over")
            assert (taken["from_member"], taken["member"], taken["epoch"]) == ("bert", "anna", 4)
            assert taken["past"][-1] == [3, taken["from_incarnation"], "bert"]


def die(inbox: pxrs.Consumer) -> None:
    """End the lease of a member that does nothing more, as the death of its process does."""
    member = inbox._member
    member._lifecycle.closing.set()
    assert member.lease is not None
    member.lease.close()


def test_a_leader_that_takes_a_partition_from_a_slow_member(hub: Hub) -> None:
    for partition in (0, 1):
        send(hub, partition=partition)
    with hub.consumer("t", "g", name="anna", ack="manual", handover_timeout=0.1) as anna:
        assert [len(anna.poll(timeout=20)) for _ in range(2)] == [1, 1]  # and has them in hand
        with hub.consumer("t", "g", name="bert") as bert:
            (fenced,) = eventually(lambda: found(hub, "partition.fenced"))
            assert (fenced["by"], fenced["from_member"], fenced["epoch"]) == ("anna", "anna", 2)
            eventually(lambda: bert.assignment == [fenced["partition"]])


def test_a_checkpoint_that_is_refused_because_the_partition_was_taken(hub: Hub) -> None:
    send(hub)
    with hub.consumer("t", "g", name="anna", commit_interval=60) as anna:
        assert anna.poll(timeout=20)
        with anna._member.session.mutex:  # so that the member cannot find out by itself
            hub.group("g").reset("earliest", force=True)
            with pytest.raises(PartitionLost):
                anna.commit()
    refused, *_ = found(hub, "partition.refused")
    assert (refused["partition"], refused["epoch"], refused["offset"]) == (0, 1, 1)
    assert found(hub, "partition.lost")[0]["partition"] == 0
    assert [(each["partition"], each["by"], each["epoch"]) for each in found(hub, "partition.freed")] == [
        (0, "reset", 2),
        (1, "reset", 2),
    ]


def test_a_member_whose_lease_has_ended(hub: Hub) -> None:
    with hub.consumer("t", "g", name="anna") as anna:
        eventually(lambda: anna.assignment == [0, 1])
        lease = anna._member.lease
        assert lease is not None
        lease.close()
        anna._member.wake()
        (lost,) = eventually(lambda: found(hub, "member.lost_lease"))
        assert (lost["member"], lost["partitions"]) == ("anna", 2)
        eventually(lambda: len(found(hub, "member.joined")) == 2)


def test_a_member_whose_handler_makes_no_progress_and_one_that_ends_because_of_an_error(hub: Hub) -> None:
    send(hub)
    with hub.consumer("t", "slow", name="anna", progress_timeout=0.05, on_error="raise") as anna:

        def wait(message: Message) -> None:
            eventually(lambda: found(hub, "member.stuck"))
            anna.stop()

        anna.run(wait)
    (stuck,) = found(hub, "member.stuck")
    assert (stuck["group"], stuck["member"], stuck["seconds"]) == ("slow", "anna", 0.05)

    def refuse(assigned: object) -> None:
        raise ValueError("not these")

    with pytest.raises(ValueError, match="not these"), hub.consumer("t", "g", name="bert", on_assigned=refuse) as bert:
        next(iter(bert))
    (failed,) = found(hub, "member.failed")
    assert (failed["member"], failed["error"], failed["error_type"]) == ("bert", "not these", "ValueError")


def test_what_a_handler_of_a_lost_partition_does_is_told_of_the_incarnation_that_owned_it(hub: Hub) -> None:
    """The member loses its lease and joins again while a handler is at work, which then fails."""
    send(hub)
    with hub.consumer("t", "g", name="anna", on_error="retry", retries_max=1, retry_pause=0) as anna:

        def fail_late(message: Message) -> None:
            if message.epoch == 1:
                assert anna._member.lease is not None
                anna._member.lease.close()
                anna._member.wake()
                eventually(lambda: len(found(hub, "member.joined")) == 2)
                fail(message)
            anna.stop()

        anna.run(fail_late)
    first, second = (each["incarnation"] for each in found(hub, "member.joined"))
    (retried,) = found(hub, "message.retried")
    assert (retried["epoch"], retried["incarnation"]) == (1, first)
    assert {each["incarnation"] for each in found(hub, "partition.lost")} == {first}
    assert second != first


def test_a_message_that_fails_pauses_its_partition_until_it_is_tried_again_and_skipped(hub: Hub) -> None:
    send(hub)
    with hub.consumer("t", "g", name="anna", on_error="retry", retries_max=1, retry_pause=0) as anna:
        running = aside(lambda: anna.run(fail))
        (paused,) = eventually(lambda: found(hub, "partition.paused"))
        assert (paused["offset"], paused["error_type"]) == (0, "ValueError")
        assert "cannot handle b'0'" in paused["error"]
        hub.group("g").retry("t", 0)
        eventually(lambda: len(found(hub, "partition.paused")) == 2)
        assert [each["offset"] for each in found(hub, "partition.retried")] == [0]
        assert [each["tries"] for each in found(hub, "message.retried")] == [1, 1]
        hub.group("g").skip("t", 0)
        (skipped,) = eventually(lambda: found(hub, "partition.skipped"))
        assert skipped["offset"] == 0
        anna.stop()
        running.result()
    assert [event.name for event in hub.audit()] == ["audit.create_topic", "audit.retry", "audit.skip"]


def test_a_dead_letter_of_a_consumer(hub: Hub) -> None:
    send(hub, 2)
    hub.create_topic("dead", partitions=1)
    with hub.consumer("t", "g", until="end", on_error="dead-letter", dead_letters="dead") as inbox:
        inbox.run(fail)
    assert [each["offset"] for each in found(hub, "message.dead_lettered")] == [0, 1]


def test_messages_of_the_topic_of_events_that_fail_make_no_further_events(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a consumer of `_events` whose handler always fails would never come to the end of it."""
    hub.create_topic("dead", partitions=1)
    with hub.consumer("t", "g", until="end") as inbox:
        list(inbox)
    count = len(list(hub.events(group="g")))
    with (
        caplog.at_level("INFO", "pxrs.events.message"),
        hub.consumer("_events", "watch", until="end", on_error="dead-letter", dead_letters="dead") as inbox,
    ):
        inbox.run(fail)
    assert len(list(hub.topic("dead").messages(0))) >= count
    assert found(hub, "message.dead_lettered") == []
    assert [vars(each).get("event") for each in caplog.records].count("message.dead_lettered") >= count


def test_items_of_a_queue_that_die_are_put_back_removed_and_returned(hub: Hub) -> None:
    queue = hub.create_queue("q", ConsumeTimes(1))
    queue.put("a")
    tx = hub.transaction()
    assert tx.take(queue) is not None
    tx.rollback(ValueError("no"))
    (dead,) = found(hub, "item.dead")
    assert (dead["queue"], dead["deliveries"], dead["error"]) == ("q", 1, "ValueError: no")
    assert queue.dead_letters().retry() == 1
    tx = hub.transaction()
    assert tx.take(queue) is not None
    store = hub.parts.queue_store()
    store.taker().lease.close()
    store.return_items_of_dead(store.catalog.queue("q"))
    tx.rollback()
    assert [(each["count"], len(each["items"])) for each in found(hub, "item.returned")] == [(1, 1)]
    assert len(found(hub, "item.dead")) == 2
    assert queue.dead_letters().purge() == 1
    hub.delete_queue("q")
    done = [event.name for event in hub.audit()][1:]
    assert done == ["audit.create_queue", "audit.requeue", "audit.purge", "audit.delete_queue"]


def test_a_round_of_upkeep_is_recorded_if_it_has_done_something(hub: Hub) -> None:
    hub.create_topic("r", partitions=1, retention_bytes=1)
    hub.run_upkeep()
    assert found(hub, "upkeep.round") == []
    with hub.producer("r", linger_s=0) as out:
        for _ in range(3):
            out.send(b"x" * 4096).result()
    hub.run_upkeep()
    (done,) = found(hub, "upkeep.round")
    assert (done["topics"], list(done["removed"]), done["errors"]) == (1, ["r"], {})


def test_what_is_done_to_a_group_is_audited(hub: Hub) -> None:
    send(hub, 3)
    with hub.consumer("t", "g", until="end") as inbox:
        assert len(list(inbox)) == 3
    group = hub.group("g")
    group.reset({0: 1}, topic="t")
    group.import_checkpoint({0: 2}, "t", force=True)
    group.delete()
    reset, imported, deleted = [event for event in hub.audit() if event.fields.get("group") == "g"]
    assert (reset.name, reset.fields["offsets"]) == ("audit.reset", {"t": {"0": 1}})
    assert (imported.name, imported.fields["offsets"]) == ("audit.import_checkpoint", {"0": 2})
    assert deleted.name == "audit.delete_group"


def test_a_run_that_ends_with_paused_partitions_tells_why(hub: Hub) -> None:
    send(hub)
    with pytest.raises(PartitionsPaused), hub.consumer("t", "g", until="end") as inbox:
        inbox.run(fail)
    assert [each["offset"] for each in found(hub, "partition.paused")] == [0]
