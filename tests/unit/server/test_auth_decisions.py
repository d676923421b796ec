"""W4: what a call names decides whether it is permitted, and a refusal tells nothing about what exists."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.errors import CommitTooLarge, Conflict, InvalidArgument, NotPermitted, TopicDeleted, UnknownTopic
from pxrs.registry import memory
from pxrs.registry.file import registry as file_registry
from pxrs.registry.memory import MemoryRegistry
from pxrs.registry.sql import registry as sql_registry
from pxrs.registry.values import ABSENT
from pxrs.server.auth.decisions import KEYS_MAX, is_permitted
from pxrs.server.auth.gate import ANYONE, Caller, Gate, visible_conflict
from pxrs.server.auth.keys import may_scan, scan_visible
from pxrs.server.auth.names import HubNames
from pxrs.server.auth.permissions import NAMES_MAX, Grant, Grants, parse_grants
from pxrs.server.auth.tokens import Token
from tests.unit.server.permitted import (
    MAIL,
    NAMES,
    NEW_QUEUE,
    ORDERS,
    SECRET_QUEUE,
    SECRET_TOPIC,
    FixedNames,
    may,
    may_commit,
)

MEMBER = ["topic:orders=read", "group:billing=member"]
WORKER = ["queue:mail=take"]
SEED = 20261117

# Grants.


@pytest.mark.parametrize(
    "text",
    [
        *("", "topic", "topic:orders", "topic:=read", "topic:orders=", "topic:orders=fly", "topics:orders=read"),
        *("hub:orders=admin", "hub=member", "group:a*b=read", "group:**=read", "topic:a/b=read", "topic: a=read"),
        *("registry:x=read", "registry:=read", "registry:/=read", "registry:a b/=read", "queue:mail=put,", "=read"),
        *("topic-id:aa=read", "stage:q/aa=write", "topic:orders=read,member", "topic:orders=read\n"),
    ],
)
def test_a_text_that_is_no_grant_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"grant|name|prefix|choose from"):
        parse_grants(text)


def test_a_grant_with_several_actions_is_several_grants_and_is_written_as_it_is_parsed() -> None:
    assert parse_grants("queue:mail*=put,read") == [Grant("queue", "mail*", "put"), Grant("queue", "mail*", "read")]
    texts = ["topic:orders=read", "registry:tenants/eu/=write", "hub=admin", "group:*=member"]
    assert Grants.parse(texts).texts == texts


@pytest.mark.parametrize(
    ("pattern", "permitted", "refused"),
    [
        ("a", ["a"], ["ab", "A", "", "a/b", "*"]),
        ("a*", ["a", "ab", "a.b", "a-"], ["b", "ba", "A", "", "*"]),
        ("a.*", ["a.", "a.b"], ["a", "ab", "axb"]),
        ("*", ["a", "anything"], []),
    ],
)
def test_a_pattern_is_a_name_or_the_beginning_of_names(pattern: str, permitted: list[str], refused: list[str]) -> None:
    grants = [f"topic:{pattern}=read"]
    assert all(may(grants, "DoGet", topic=name) for name in permitted)
    assert not any(may(grants, "DoGet", topic=name) for name in refused)


def test_w5_what_is_remembered_of_names_is_bounded() -> None:
    grants = Grants.parse(["topic:a*=read"])
    assert all(grants.may("topic", f"a{number}", "read") for number in range(NAMES_MAX + 10))
    assert len(grants._known) <= NAMES_MAX
    grants = Grants.parse(["topic:a*=read"])
    assert grants.may("topic", "a" * 1_000_000, "read")
    assert not grants.may("topic", "b" * 1_000_000, "read")
    assert not grants._known


# Keys.


@pytest.mark.parametrize(
    "key",
    [
        *("groups/billing/../secret/leader", "groups//billing/leader", "/groups/billing/leader", "groups/billing/"),
        *("groups/billing", "groups/billingx/leader", "groups/Billing/leader", "groups/billing./leader"),
        *("groups/./billing/leader", "GROUPS/billing/leader", "groups /billing/leader", "groups/billing\0/leader"),
        *("", ".", "..", "groups/billing/leader;x", "groups/billing/lea der", "groups/billing/\u00fc", "x" * 600),
    ],
)
def test_a_key_that_only_looks_like_one_of_the_group_is_refused(key: str) -> None:
    grants = ["group:billing=admin", "topic:orders=read"]
    assert may(grants, "registry.get", key="groups/billing/leader")
    if key != "groups/billing":  # nothing is stored there, and the name is the group's
        assert not may(grants, "registry.get", key=key)
        assert not may_commit(grants, put={key: b""})
    assert not may_commit(grants, put={"groups/billing/leader": b"", "groups/secret/leader": b""})


def test_keys_of_ids_are_permitted_by_the_name_that_the_server_knows() -> None:
    assert may_commit(WORKER, delete=[f"items/{MAIL}/ready/x"])
    for id in (SECRET_QUEUE, NEW_QUEUE, "mail", "*", "", f"{MAIL}/../{SECRET_QUEUE}", MAIL.upper()):
        assert not may_commit(WORKER, delete=[f"items/{id}/ready/x"]), id
        assert not may(WORKER, "registry.scan", prefix=f"items/{id}/"), id
    assert not may(["topic:orders=write"], "registry.get", key=f"spark/{SECRET_TOPIC}/query")
    assert not may(["topic:orders=write"], "registry.get", key="spark/orders/query"), "a name where an id belongs"


def test_what_has_not_the_form_of_an_id_names_no_queue_whatever_is_stored_for_it() -> None:
    class Stored(FixedNames):
        def queue(self, id: str) -> str | None:
            return "mail"  # a key `standing/*` would stand for all ids, and be read with the prefix `items/`

    grants = Grants.parse(WORKER)
    assert not may_scan(grants, Stored(), "items/")
    assert not is_permitted(grants, Stored(), "registry.watch", {"prefixes": ["standing/"]})
    assert is_permitted(grants, Stored(), "registry.watch", {"prefixes": [f"items/{MAIL}/"]})


def test_a_client_cannot_give_the_id_of_a_queue_another_name() -> None:
    admin = ["queue:mail=admin"]
    new, own, foreign = f"standing/{NEW_QUEUE}", f"standing/{MAIL}", f"standing/{SECRET_QUEUE}"
    assert may_commit(admin, expect={new: ABSENT, "queues/mail": ABSENT}, put={new: b"mail", "queues/mail": b"{}"})
    assert not may_commit(admin, put={new: b"mail"}), "it must expect the key to be absent"
    assert not may_commit(admin, expect={new: 3}, put={new: b"mail"})
    assert not may_commit(admin, expect={new: ABSENT}, put={new: b"secret"})
    assert not may_commit(admin, expect={foreign: ABSENT}, put={foreign: b"mail"}), "the id is another queue's"
    assert not may_commit(admin, put={own: b"secret"})
    assert not may_commit(admin, put={f"deleted/{MAIL}": b"secret"})
    assert not may_commit(admin, put={f"deleted/{SECRET_QUEUE}": b"mail"})
    for id in ("*", "x", MAIL[:-1], f"{NEW_QUEUE}0"):
        key = f"standing/{id}"
        assert not may_commit(admin, expect={key: ABSENT}, put={key: b"mail"}), "no id: it would stand for all queues"
    assert not may_commit(["queue:mail=take"], expect={new: ABSENT}, put={new: b"mail"})
    for id, is_own in ((MAIL, True), (NEW_QUEUE, True), (SECRET_QUEUE, False)):
        record = json.dumps({"id": id}).encode()
        assert may_commit(admin, expect={"queues/mail": ABSENT}, put={"queues/mail": record}) == is_own, id


def test_who_only_puts_cannot_read_change_or_remove_an_item() -> None:
    putter, item = ["queue:mail=put"], f"items/{MAIL}/ready/5000.aa.0"
    assert may_commit(putter, expect={item: ABSENT, f"standing/{MAIL}": 4}, put={item: b""})
    assert not may_commit(putter, put={item: b""}), "without an expectation it might replace an item"
    assert not may_commit(putter, expect={item: 3}, put={item: b""})
    assert not may_commit(putter, expect={item: ABSENT}), "that would tell whether the item is there"
    assert not may_commit(putter, delete=[item])
    assert not may(putter, "registry.get", key=item)
    assert not may(putter, "registry.watch", prefixes=[f"items/{MAIL}/ready/"])


def test_a_taker_creates_its_own_key_and_cannot_replace_or_remove_that_of_another() -> None:
    assert may_commit(WORKER, expect={"takers/me": ABSENT}, ephemeral={"takers/me": b""})
    assert not may_commit(WORKER, expect={"takers/other": 5}, ephemeral={"takers/other": b""})
    assert not may_commit(WORKER, delete=["takers/other"])


def test_o10_a_group_is_no_way_to_hold_up_the_retention_of_a_topic_that_the_caller_may_not_read() -> None:
    for folder in ("checkpoints", "owners", "paused"):
        assert may_commit(MEMBER, put={f"groups/billing/{folder}/{ORDERS}/00000": b""})
        assert not may_commit(MEMBER, put={f"groups/billing/{folder}/{SECRET_TOPIC}/00000": b""})
    for folder in ("starts", "pinning"):
        assert not may_commit(MEMBER, put={f"groups/billing/{folder}/{SECRET_TOPIC}": b""})
    table = "c" * 32
    assert may_commit(MEMBER, put={f"groups/billing/checkpoints/{table}/00000": b""}), "a table, or a deleted topic"
    admin = ["group:billing=admin"]
    assert may_commit(admin, delete=[f"groups/billing/checkpoints/{SECRET_TOPIC}/00000"]), "the group can be deleted"


def test_r4_a_member_does_not_delete_what_guards_other_writes() -> None:
    for guard in ("leader", f"owners/{ORDERS}/00000", f"checkpoints/{ORDERS}/00000", "hub", "assignor", "unknown"):
        assert not may_commit(MEMBER, delete=[f"groups/billing/{guard}"])
        assert not may_commit(MEMBER, ephemeral={f"groups/billing/{guard}": b""}), "the end of the lease deletes it"
    assert may_commit(MEMBER, delete=["groups/billing/targets/i1"])
    assert may_commit(MEMBER, ephemeral={"groups/billing/members/i1": b""})
    sequence, item = f"items/{MAIL}/sequence", f"items/{MAIL}/ready/x"
    assert may_commit(["queue:mail=put"], put={sequence: b""})
    assert not may_commit(["queue:mail=put"], ephemeral={sequence: b""})
    assert not may_commit(["queue:mail=put"], expect={item: ABSENT}, ephemeral={item: b""})
    assert not may_commit(["hub=admin"], expect={"spark/registry": ABSENT}, ephemeral={"spark/registry": b"a" * 32})


@pytest.mark.parametrize("key", ["upkeep/h/janitor", "cluster/brokers/1", f"topics/{ORDERS}/start"])
def test_w4_c6_no_token_writes_what_only_the_server_writes(key: str) -> None:
    for grants in (
        ["hub=admin"],
        ["registry:upkeep/=write", "registry:topics/=write", "topic:*=admin", "group:*=admin"],
    ):
        assert not may_commit(grants, put={key: b""})
        assert not may_commit(grants, expect={key: ABSENT}, ephemeral={key: b""})
        assert not may_commit(grants, delete=[key])
    assert may(["hub=admin"], "registry.get", key=key)


def test_the_id_of_the_registry_is_created_once_in_its_form_and_never_changed() -> None:
    key, id = "spark/registry", ORDERS.encode()
    for grants in (MEMBER, ["hub=admin"]):
        assert may_commit(grants, expect={key: ABSENT}, put={key: id})
        assert not may_commit(grants, expect={key: ABSENT}, put={key: b"\xff not an id"})
        assert not may_commit(grants, put={key: id})
        assert not may_commit(grants, expect={key: 3}, put={key: id})
        assert not may_commit(grants, delete=[key])
    assert not may_commit(["hub=read"], expect={key: ABSENT}, put={key: id})


def test_no_token_reads_the_secrets_of_the_server() -> None:
    for grants in (["hub=admin"], ["hub=read"], ["registry:server/=write"]):
        assert not may(grants, "registry.get", key="server/capabilities/q")
        assert not may(grants, "registry.scan", prefix="server/")
        assert not may(grants, "registry.watch", prefixes=["server/capabilities/"])
        assert not may_commit(grants, expect={"server/capabilities/q": ABSENT})


def test_w4_one_forbidden_key_among_permitted_ones_refuses_the_whole_commit() -> None:
    rolls = random.Random(SEED)
    grants = ["topic:orders=read", "group:billing=admin", "queue:mail=take", "registry:own/=write"]
    permitted = ["groups/billing/leader", f"items/{MAIL}/turn", "own/a", "own/b/c", "groups/billing/members/m"]
    permitted += [f"groups/billing/checkpoints/{ORDERS}/0000{n}" for n in range(5)]
    forbidden = ["groups/secret/leader", f"items/{SECRET_QUEUE}/turn", "others/a", "owns", f"standing/{MAIL}x"]
    forbidden += [
        "upkeep/h/report",
        f"spark/{ORDERS}/q",
        "server/x",
        f"groups/billing/checkpoints/{SECRET_TOPIC}/00001",
    ]
    parts = ["expect", "put", "ephemeral", "delete"]
    for _ in range(500):
        keys = rolls.sample(permitted, rolls.randint(1, len(permitted)))
        names = dict.fromkeys(keys, "put") | {key: rolls.choice(parts) for key in keys}
        assert may_commit(grants, **commit_of(names)), names
        bad, part = rolls.choice(forbidden), rolls.choice(parts)
        if bad.startswith("groups/billing/") and part in ("expect", "delete"):
            continue  # the group is the caller's: only a put needs the topic
        mixed = list({**names, bad: part}.items())
        rolls.shuffle(mixed)
        assert not may_commit(grants, **commit_of(dict(mixed))), f"SEED={SEED}: {mixed}"


def commit_of(names: dict[str, str]) -> dict[str, object]:  # type: ignore[misc]
    by_part = {part: [key for key, each in names.items() if each == part] for part in set(names.values())}
    return {
        part: dict.fromkeys(keys, 1 if part == "expect" else b"") if part != "delete" else keys
        for part, keys in by_part.items()
    }


def test_an_unknown_call_is_permitted_to_nobody_and_wrong_types_are_errors() -> None:
    assert not may(["hub=admin"], "registry.destroy")
    assert not may(["hub=admin"], "")
    for call, arguments in (
        ("registry.get", {"key": 7}),
        ("registry.get", {}),
        ("registry.scan", {"prefix": None}),
        ("registry.watch", {"prefixes": "groups/"}),
        ("registry.commit", {"put": ["a"]}),
        ("registry.commit", {"expect": 3}),
        ("registry.commit", {"delete": {"a": 1}}),
        ("log.create_topic", {"settings": "orders"}),
        ("DoGet", {"topic": ["orders"]}),
    ):
        with pytest.raises(InvalidArgument):
            may(["hub=admin"], call, **arguments)  # type: ignore[arg-type]


# Scans.


@pytest.fixture
def registry() -> Iterator[MemoryRegistry]:
    with MemoryRegistry() as found:
        groups = ["a", "a-b", "ab", "b", "secret", "zz"]
        found.commit(put={f"groups/{group}/{key}": b"" for group in groups for key in ("leader", "members/1")})
        found.commit(put={f"queues/{queue}": b"" for queue in ("mail", "mail2", "mailbox", "secret")})
        found.commit(put={f"sources/{name}": b"" for name in ("orders", "secret")})
        found.commit(
            put={f"deleted/{MAIL}": b"mail", f"deleted/{SECRET_QUEUE}": b"secret", "server/capabilities/q": b"s"}
        )
        found.commit(put={f"spark/{ORDERS}/q": b"", f"spark/{SECRET_TOPIC}/q": b"", "spark/registry": b"id"})
        yield found


def scanned(registry: MemoryRegistry, grants: list[str], prefix: str) -> list[str]:
    """The keys of one scan, which must be the same in steps of every size."""
    found = Grants.parse(grants)
    assert may_scan(found, NAMES, prefix)
    whole = [entry.key for entry in scan_visible(found, NAMES, registry.scan, prefix, None, None)]
    for limit in (1, 2, 3):
        stepped: list[str] = []
        while page := scan_visible(found, NAMES, registry.scan, prefix, stepped[-1] if stepped else None, limit):
            stepped += [entry.key for entry in page]
            if len(page) < limit:
                break
        assert stepped == whole
    return whole


@pytest.mark.parametrize(
    ("grants", "prefix", "found"),
    [
        (["group:a=read"], "groups/", ["groups/a/leader", "groups/a/members/1"]),
        (["group:a=read", "group:ab=read", "group:a-b=read"], "groups/", ["a-b", "a", "ab"]),
        (["group:a*=read", "group:ab=member"], "groups/", ["a-b", "a", "ab"]),
        (["group:*=read"], "groups/", ["a-b", "a", "ab", "b", "secret", "zz"]),
        (["topic:a=read"], "groups/", []),
        (["queue:mail=put", "queue:mail2=read"], "queues/", ["queues/mail", "queues/mail2"]),
        (["queue:mail*=put"], "queues/", ["queues/mail", "queues/mail2", "queues/mailbox"]),
        (["group:a=read"], "sources/", []),
        (["topic:orders=describe"], "sources/", ["sources/orders"]),
        (["queue:mail=take"], "deleted/", [f"deleted/{MAIL}"]),
        (["topic:orders=write"], "spark/", [f"spark/{ORDERS}/q", "spark/registry"]),
        (["registry:groups/zz/=read"], "groups/", ["groups/zz/leader", "groups/zz/members/1"]),
    ],
)
def test_w4_a_list_has_what_the_caller_may_read(
    registry: MemoryRegistry, grants: list[str], prefix: str, found: list[str]
) -> None:
    if prefix == "groups/" and found and "/" not in found[0]:
        found = [f"groups/{group}/{key}" for group in found for key in ("leader", "members/1")]
    assert scanned(registry, grants, prefix) == found


def test_a_scan_of_everything_needs_the_hub_and_has_no_secrets_of_the_server(registry: MemoryRegistry) -> None:
    everything = [entry.key for entry in registry.scan("")]
    assert scanned(registry, ["hub=read"], "") == [key for key in everything if not key.startswith("server/")]
    assert scanned(registry, ["hub=admin"], "") == scanned(registry, ["hub=read"], "")
    assert not may(["registry:groups/=read", "topic:*=admin"], "registry.scan", prefix="")


@pytest.mark.parametrize("prefix", ["groups/secret/", "items/", "standing/", "topics/", "others/", "upkeep/", "own"])
def test_w4_a_prefix_is_scanned_and_watched_only_by_who_may_read_all_of_it(prefix: str) -> None:
    grants = ["group:billing=admin", "queue:mail=admin", "topic:orders=admin", "registry:others/mine/=write"]
    assert not may(grants, "registry.scan", prefix=prefix)
    assert not may(grants, "registry.watch", prefixes=[prefix])
    assert not may(grants, "registry.watch", prefixes=["groups/billing/", prefix])
    assert may(grants, "registry.watch", prefixes=["groups/billing/", f"items/{MAIL}/ready/", "takers/"])
    assert not may(grants, "registry.watch", prefixes=["groups/"]), "a wake would tell that another group is there"


# What answers and errors show.


def gate_for(grants: list[str]) -> tuple[Gate, Caller]:
    """An open gate, and a caller with these grants: `shown` and `topics` go by the caller alone."""
    return Gate(None, NAMES), Caller(Grants.parse(grants), Token("0" * 12, "x", Grants.parse(grants), 0.0))


def test_w4_a_conflict_names_only_keys_that_the_caller_may_read() -> None:
    conflict = Conflict(["groups/billing/leader", "groups/secret/leader", f"items/{SECRET_QUEUE}/turn"])
    found = visible_conflict(conflict, Grants.parse(MEMBER), NAMES)
    assert found.keys == ("groups/billing/leader",)
    assert "secret" not in str(found)
    gate, caller = gate_for(MEMBER)
    assert gate.shown(caller, conflict).state() == found.state()
    assert "groups/secret/leader" in str(gate.shown(ANYONE, conflict))


def test_w4_unknown_topics_and_lists_name_only_topics_that_the_caller_may_see() -> None:
    gate, caller = gate_for(["topic:orders=write", "topic:eu-*=describe"])
    error = gate.shown(caller, UnknownTopic("nothing", ["eu-a", "orders", "secret"]))
    assert isinstance(error, UnknownTopic)
    assert error.choices == ("eu-a", "orders")
    assert "secret" not in str(error)
    assert gate.topics(caller, ["eu-a", "orders", "secret"], str) == ["eu-a", "orders"]
    deleted = TopicDeleted("orders", ORDERS, False)
    assert gate.shown(caller, deleted) is deleted


def test_w4_a_refusal_has_the_same_text_whether_or_not_the_thing_exists(tmp_path: Path) -> None:
    from pxrs.server.auth import tokens

    path = str(tmp_path / "tokens")
    _, token = tokens.create(path, "ci", ["topic:orders=read"], now=0.0)
    gate = Gate(path, NAMES)
    caller = gate.identify({"authorization": f"Bearer {token}"})
    texts = set()
    for topic in ("secret", "never-was", "orders2"):
        with pytest.raises(NotPermitted) as refused:
            gate.check(caller, "DoGet", {"topic": topic, "topic_id": SECRET_TOPIC})
        texts.add((str(refused.value), str(refused.value.state())))
    assert len(texts) == 1
    for key in (f"items/{SECRET_QUEUE}/turn", f"items/{NEW_QUEUE}/turn", "groups/secret/leader", "groups/none/leader"):
        with pytest.raises(NotPermitted) as refused:
            gate.check(caller, "registry.get", {"key": key})
        assert key not in str(refused.value)


# Names.


def test_names_come_from_the_log_and_the_registry_and_new_ones_count_at_once(tmp_path: Path) -> None:
    with pxrs.open(tmp_path, upkeep=False) as hub:
        names = HubNames(hub.topics, hub.registry.get)
        assert names.topic(ORDERS) is None
        created = hub.create_topic("orders", partitions=1)
        assert names.topic(created.id) == "orders"
        queue = hub.create_queue("mail").settings
        assert (names.queue(queue.id), names.queue(NEW_QUEUE)) == ("mail", None)
        late = hub.create_topic("late", partitions=1)
        assert names.topic(late.id) == "late"
        hub.delete_topic("orders")
        assert names.topic(created.id) == "orders", "members still write their last checkpoints"
        assert HubNames(hub.topics, hub.registry.get).topic(created.id) is None
        hub.registry.commit(put={f"deleted/{NEW_QUEUE}": b"gone"})
        assert names.queue(NEW_QUEUE) == "gone", "what is left of it can be removed by its takers"


def test_w5_the_topics_are_listed_once_for_a_call_that_names_many_ids_of_no_topic(tmp_path: Path) -> None:
    listings = []

    def listed() -> list[pxrs.Topic]:
        listings.append(1)
        return hub.topics()

    with pxrs.open(tmp_path, upkeep=False) as hub:
        gate = Gate(None, HubNames(listed, hub.registry.get))
        caller = Caller(Grants.parse(MEMBER))
        put = {f"groups/billing/checkpoints/{uuid.uuid4().hex}/00000": "" for _ in range(100)}
        gate.check(caller, "registry.commit", {"put": put})
        assert len(listings) == 1
        late = hub.create_topic("late", partitions=1)
        with pytest.raises(NotPermitted):  # a topic that is new since then counts
            gate.check(caller, "registry.commit", {"put": {f"groups/billing/checkpoints/{late.id}/00000": ""}})


def test_w5_a_commit_of_more_keys_than_any_store_takes_is_refused_before_it_is_decided_about() -> None:
    put = {f"groups/billing/targets/{number}": b"" for number in range(KEYS_MAX)}
    assert may_commit(MEMBER, put=put)
    with pytest.raises(CommitTooLarge):
        may_commit(MEMBER, put={**put, "groups/billing/assignment": b""})
    assert max(each.commit_keys_max for each in (file_registry.LIMITS, memory.LIMITS, sql_registry.LIMITS)) <= KEYS_MAX


def test_w4_a_staged_file_of_another_topic_cannot_be_removed_under_the_name_of_ones_own() -> None:
    for grants in (["topic:orders=write"], Grants((Grant("stage-name", "orders", "write"),))):
        assert may(grants, "staging.remove", topic="orders", topic_id=ORDERS)
        assert not may(grants, "staging.remove", topic="orders", topic_id=SECRET_TOPIC)


def test_a_taker_may_do_what_looking_after_its_queues_needs() -> None:
    for prefix in ("deleted/", "outcomes/", "takers/", "queues/", f"items/{MAIL}/inflight/", f"items/{MAIL}/"):
        assert may(WORKER, "registry.scan", prefix=prefix), prefix
    assert may(WORKER, "registry.watch", prefixes=["takers/", f"items/{MAIL}/delayed/", f"items/{MAIL}/sweeper"])
    returned = f"items/{MAIL}/inflight/5000.aa.1~x~gone", f"items/{MAIL}/ready/5000.aa.2"
    assert may_commit(
        WORKER,
        expect={"takers/gone": ABSENT, returned[0]: 4, returned[1]: ABSENT},
        put={returned[1]: b""},
        delete=[returned[0]],
    )
    assert may_commit(WORKER, expect={"outcomes/gone-1": 3}, delete=["outcomes/gone-1"])
    assert may_commit(WORKER, expect={f"deleted/{MAIL}": 3}, delete=[f"deleted/{MAIL}", f"items/{MAIL}/turn"])
