"""A group's description as text: what `print(hub.group(...).describe())` shows."""

from __future__ import annotations

import subprocess
import sys

from pxrs.group.description import GroupDescription, MemberDescription, PartitionDescription
from pxrs.group.lag import TopicLag
from pxrs.group.records import Paused

T = 1_700_000_000.0


def row(partition: int, **more: object) -> PartitionDescription:
    fields: dict[str, object] = {
        "owner": "i1",
        "owner_name": "anna",
        "is_owner_there": True,
        "target": "i1",
        "epoch": 3,
        "checkpoint": 1_200,
        "when": T,
        "by": "anna",
        "start": 0,
        "end": 1_205,
        "lag": 5,
        "is_lag_exact": True,
        "paused": None,
    }
    return PartitionDescription("orders", "id", partition, **{**fields, **more})  # type: ignore[arg-type]


MEMBERS = (
    MemberDescription("i1", "anna", "host-a", 7, "orders", T, 2),
    MemberDescription("i2", "ben\x1b[2J\n", "host-b", 12_345, "orders", T + 60, 0),
)


def test_a_description_prints_as_tables_of_members_and_partitions() -> None:
    rows = (
        row(0),
        row(1, target="i2"),
        row(2, is_owner_there=False, epoch=1, paused=Paused(1_200, "ValueError: bad\x07\nsecond", T, "anna")),
        row(
            3,
            owner=None,
            owner_name=None,
            is_owner_there=False,
            target=None,
            checkpoint=None,
            when=None,
            by=None,
            lag=None,
        ),
    )
    found = GroupDescription("billing", 4, "i1", MEMBERS, rows, (TopicLag("orders", "id", False, 15, True),))
    assert str(found).splitlines() == [
        "group billing: 2 members, 4 partitions, generation 4, lag 15",
        "",
        "member         host    topic   since                   pid  partitions",
        "anna (leader)  host-a  orders  2023-11-14 22:13:20Z      7           2",
        "ben\\x1b[2J\\n   host-b  orders  2023-11-14 22:14:20Z  12345           0",
        "",
        "topic   partition  epoch  checkpoint    end  lag  owner                 when                  by",
        "orders          0      3       1,200  1,205    5  anna                  2023-11-14 22:13:20Z  anna",
        "orders          1      3       1,200  1,205    5  anna -> ben\\x1b[2J\\n  2023-11-14 22:13:20Z  anna",
        "orders          2      1       1,200  1,205    5  anna (gone)           2023-11-14 22:13:20Z  anna",
        "orders          3      3           -  1,205    -  free                  -",
        "",
        "orders/2 is paused at offset 1200: ValueError: bad\\x07\\nsecond",
        "continue orders/2 with `pxrs group retry billing orders 2` or `pxrs group skip billing orders 2`",
    ]


def test_a_description_without_members_has_no_table_of_them() -> None:
    lines = str(GroupDescription("g", 1, None, (), (row(0, lag=0),), ())).splitlines()
    assert lines[0] == "group g: 0 members, 1 partition, generation 1, lag 0"
    assert [line.split()[0] for line in lines[2:]] == ["topic", "orders"]
    assert str(GroupDescription("g", 1, None, (), (), ())) == "group g: 0 members, 0 partitions, generation 1, lag 0"


def test_a_lag_that_is_a_bound_or_is_not_known_is_shown_as_that() -> None:
    rows = (row(0, is_lag_exact=False), row(1, lag=None, is_lag_exact=False))
    bound = GroupDescription("g", 1, None, (), rows, (TopicLag("events", "id", True, 5, False),))
    assert str(bound).splitlines()[0].endswith(", lag <= 5")
    assert [line.split()[5] for line in str(bound).splitlines()[3:]] == ["<=", "-"]
    problem = "the lag in events is not known: no route to \x1b host"
    unknown = GroupDescription("g", 1, None, (), (), (TopicLag("events", "id", True, None, False, problem),))
    first, _, last = str(unknown).splitlines()
    assert first.endswith(", lag unknown")
    assert last == "the lag in events is not known: no route to \\x1b host"


def test_a_description_needs_no_package_of_the_command_line() -> None:
    code = "import sys; import pxrs.group.admin; print([name for name in ('rich', 'typer') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
