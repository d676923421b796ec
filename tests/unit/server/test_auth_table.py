"""W4: every call and key x every kind of token is permitted exactly where the tables in docs/serve.md say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from pxrs.registry.values import ABSENT
from pxrs.server import calls
from pxrs.server.auth.decisions import CALLS
from pxrs.server.auth.permissions import ACTIONS
from tests.unit.server.permitted import MAIL, NEW_QUEUE, ORDERS, may, may_commit

ROOT = Path(__file__).parents[3]
ANY = "any valid token"
WRITER = "a token that may write something"
NOBODY = ["topic:nobody-else=describe"]
"""A token that is valid and has no permission for anything that is asked for here."""


class Row(NamedTuple):
    subject: str
    """A call, or a key."""
    cells: dict[str, str]
    """By the head of the column."""


def tables() -> list[list[Row]]:
    text = (ROOT / "docs/serve.md").read_text()
    _, _, section = text.partition("\n## Permissions\n")
    section, _, _ = section.partition("\n## ")
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        heads = [each.strip("| ") for each in head]
        rows = [[each.strip("| ") for each in line] for line in lines]
        found.append([Row(row[0].strip("`"), dict(zip(heads[1:], row[1:], strict=True))) for row in rows])
    return found


_ROLES, _TOPIC_CALLS, _OTHER_CALLS, *_KEYS = tables()
NAME_OF = {"topic": "orders", "group": "billing", "queue": "mail"}


def grants_of(column: str, key: str = "") -> list[str]:
    """The grants that a column stands for, for the thing that the row names."""
    if column == ANY:
        return NOBODY
    kind, action = column.replace("`", "").split(" ")
    if kind == "hub":
        return [f"hub={action}"]
    if kind == "registry":
        prefix = key.rpartition("/")[0]
        return [f"registry:{prefix or 'elsewhere'}/={action}"]
    return [f"{kind}:{NAME_OF[kind]}={action}"]


def arguments_of(call: str) -> dict[str, object]:
    if call == "log.create_topic":
        return {"settings": {"name": "orders"}}
    return {"topic": "orders", "topic_id": ORDERS, "feed": json.dumps({"topic": ORDERS})}


def others(grant: str) -> list[str]:
    """Grants that look alike and are for something else."""
    kind, name, action = re.fullmatch(r"(\w+):(.+)=(\w+)", grant).groups()  # type: ignore[union-attr]
    return [f"{kind}:{name[:-1]}={action}", f"{kind}:{name}x={action}", f"{kind}:{name}x*={action}"]


def test_the_tables_have_every_call_and_every_action() -> None:
    rows = [row.subject for row in (*_TOPIC_CALLS, *_OTHER_CALLS)]
    assert sorted(rows) == sorted(CALLS)
    assert {*calls.CALLS, *calls.WATCHING} <= {*CALLS}, "the server has a call that nobody decides about"
    columns = {column for table in (_TOPIC_CALLS, *_KEYS) for row in table for column in row.cells}
    asked = {f"`{kind}` {action}" for kind, actions in ACTIONS.items() for action in actions}
    # Storage nodes of a cluster ask for `cluster` member; no call of `pxrs serve` does.
    assert columns - {ANY} == asked - {"`cluster` member"}
    assert len(_KEYS) == 4


CALL_CELLS = [(row.subject, column, cell) for row in _TOPIC_CALLS for column, cell in row.cells.items()]


@pytest.mark.parametrize(("call", "column", "cell"), CALL_CELLS)
def test_w4_a_call_on_a_topic_is_permitted_exactly_where_the_table_says(call: str, column: str, cell: str) -> None:
    assert cell in ("yes", "-")
    arguments = arguments_of(call)
    (grant,) = grants_of(column)
    assert may([grant], call, **arguments) == (cell == "yes")
    assert may(["hub=admin"], call, **arguments)
    assert not may(NOBODY, call, **arguments)
    if grant.startswith("topic"):
        assert not any(may([other], call, **arguments) for other in others(grant))
        for pattern in ("*", "ord*", "orders*"):
            assert may([grant.replace("orders", pattern)], call, **arguments) == (cell == "yes")


@pytest.mark.parametrize("row", _OTHER_CALLS, ids=lambda row: row.subject)
def test_w4_other_calls_need_what_the_table_says(row: Row) -> None:
    needs, call = row.cells["needs"], row.subject
    readers = [NOBODY, ["hub=read"], ["topic:a=read"], ["group:*=read"], ["queue:q=read"], ["registry:x/=read"]]
    writers = [["topic:a=write"], ["group:g=member"], ["queue:*=put"], ["registry:x/=write"], ["hub=admin"]]
    writers += [["topic:a=admin"], ["group:g=admin"], ["queue:q=take"], ["queue:q=admin"]]
    if needs.startswith(ANY):
        assert all(may(grants, call) for grants in [*readers, *writers])
        if "joins" in needs:
            assert all(may(grants, call, joins=True) for grants in writers)
            assert not any(may(grants, call, joins=True) for grants in readers)
    elif needs == WRITER:
        assert all(may(grants, call) for grants in writers)
        assert not any(may(grants, call) for grants in readers)
    else:  # decided by its keys or events: see the tests below
        assert call in ("events.record", "registry.get", "registry.scan", "registry.watch", "registry.commit")


def event(**fields: object) -> str:
    return json.dumps({"name": "member.joined", "at": 0, "fields": fields})


@pytest.mark.parametrize(
    ("fields", "grant"),
    [
        ({"group": "billing", "topic": "orders"}, "group:billing=member"),
        ({"queue": "mail"}, "queue:mail=put"),
        ({"topic": "orders"}, "topic:orders=write"),
        ({"topic": "orders"}, "topic:orders=admin"),
        ({}, "queue:other=put"),
    ],
)
def test_w4_a_client_records_only_events_of_what_it_may_change(fields: dict[str, object], grant: str) -> None:
    assert may([grant], "events.record", events=[event(**fields)])
    assert may(["hub=admin"], "events.record", events=[event(**fields)])
    assert not may(["hub=read"], "events.record", events=[event(**fields)])
    if fields:
        assert not any(may([each], "events.record", events=[event(**fields)]) for each in others(grant))
    assert not may([grant], "events.record", events=[event(**fields), event(group="another")])


def test_w4_who_may_read_one_topic_and_write_another_may_record_that_it_copied_the_one_into_the_other() -> None:
    fields = {"topic": "orders", "target": "copy"}
    copied = json.dumps({"name": "audit.copy_topic", "at": 0, "fields": fields})
    assert may(["topic:orders=read", "topic:copy=write"], "events.record", events=[copied])
    assert not may(["topic:orders=write"], "events.record", events=[copied])


def test_w4_internal_topics_are_read_by_name_or_by_readers_of_the_hub_and_written_by_nobody() -> None:
    for grants in (["hub=read"], ["hub=admin"], ["topic:_events=read"]):
        assert may(grants, "DoGet", topic="_events")
    assert not may(["topic:*=admin"], "DoGet", topic="_events")
    assert not may(["topic:_audit=read"], "DoGet", topic="_events")
    for grants in (["hub=admin"], ["topic:*=write"], ["topic:_events=write"], ["topic:_events=admin"]):
        assert not may(grants, "DoPut", topic="_events")
        assert not may(grants, "staging.publish", topic="_events")


def key_of(template: str, column: str) -> str:
    id = ORDERS if "topic" in column or template.startswith("topics/") else MAIL
    topic = "orders" if template.startswith("sources/") else ORDERS
    for mark, text in {"<group>": "billing", "<id>": id, "<topic>": topic, "<queue>": "mail"}.items():
        template = template.replace(mark, text)
    return re.sub(r"<(\w+)>", r"some-\1", template)


KEY_CELLS = [(row.subject, column, cell) for table in _KEYS for row in table for column, cell in row.cells.items()]


@pytest.mark.parametrize(("template", "column", "cell"), KEY_CELLS)
def test_w4_a_key_is_read_and_written_exactly_where_the_table_says(template: str, column: str, cell: str) -> None:
    assert re.fullmatch(r"-|r?c?p?d?", cell)
    key = key_of(template, column)
    grants = [*grants_of(column, key), "topic:orders=read"] if column.startswith("`group`") else grants_of(column, key)
    assert found_letters(grants, key) == cell.strip("-")
    if key.count("/") and column.split(" ")[0] in ("`group`", "`queue`", "`topic`"):
        assert found_letters(NOBODY, key) == "", "a token for something else"
        if not key.startswith(("takers/", "outcomes/")):  # which name no queue
            for other in others(grants[0]):
                assert found_letters([other], key) == "", other
        assert found_letters(["hub=read"], key) == "r"
        only_read = key.endswith("/start")
        assert found_letters(["hub=admin"], key) == ("r" if only_read else "rcpd")


def found_letters(grants: list[str], key: str) -> str:
    """What a token with these grants can do with a key, found out by calls."""
    value = ORDERS.encode() if key == "spark/registry" else b"mail"
    reads = {
        may(grants, "registry.get", key=key),
        may(grants, "registry.watch", prefixes=[key]),
        may_commit(grants, expect={key: 7}),
        may_commit(grants, expect={key: ABSENT}),
    }
    assert len(reads) == 1, f"{key}: reading, watching and expecting differ"
    new = key.replace(MAIL, NEW_QUEUE) if key.startswith("standing/") else key
    creates = may_commit(grants, expect={new: ABSENT}, put={new: value})
    puts = may_commit(grants, put={key: value})
    assert creates or not puts
    deletes = may_commit(grants, delete=[key])
    assert (puts and deletes) == may_commit(grants, ephemeral={key: value}), "the end of the lease deletes the key"
    letters = {"r": reads.pop(), "c": creates, "p": puts, "d": deletes}
    return "".join(letter for letter, is_permitted in letters.items() if is_permitted)


def test_the_manifest_of_a_routed_query_needs_all_topics() -> None:
    key = "spark/routed/hub.query"
    assert found_letters(["topic:*=write"], key) == "rcpd"
    assert found_letters(["topic:o*=write"], key) == ""


def test_the_gate_of_a_topic_is_written_by_readers_that_are_members_of_a_group() -> None:
    key = f"topics/{ORDERS}/gate"
    assert found_letters(["topic:orders=read", "group:billing=member"], key) == "rcp"
    assert found_letters(["topic:secret=read", "group:*=admin"], key) == ""
    assert found_letters(["topic:orders=read", "group:*=read"], key) == "r"


@pytest.mark.parametrize("row", _ROLES, ids=lambda row: row.subject)
def test_the_grants_of_each_role_can_be_parsed(row: Row) -> None:
    for grant in re.findall(r"`(.+?)`", row.cells["grants"]):
        assert may([grant], "server.ping")
