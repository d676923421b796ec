"""Whether a call is permitted, by all that it names (W4). Nothing here does I/O, but `Names` may.

`CALLS` has every call of docs/wire.md, and the methods of Flight that name a topic. A call that is not in it is
permitted to nobody, so that a new call cannot be forgotten here. docs/serve.md has the same table for people; a test
compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pxrs.errors import CommitTooLarge, InvalidArgument
from pxrs.remote import wire
from pxrs.server.auth.keys import Names, may_commit, may_read, may_scan, may_watch
from pxrs.server.auth.permissions import Grants

KEYS_MAX: Final = 4_096
"""How many keys a commit may name before it is decided about: each may take a look into the registry. No store takes
more."""

Arguments = Mapping[str, Any]
Decision = Callable[[Grants, Names, str, Arguments], bool]


def is_permitted(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    """Whether a caller with these grants may make this call. Raises InvalidArgument if an argument that the decision
    needs is missing or of another type. Has no effect."""
    decision = CALLS.get(call)
    return decision is not None and decision(grants, names, call, arguments)


def _anyone(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return True


def _writer(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return grants.is_writer


def _identity(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return grants.is_writer or not arguments.get("joins", False)


def _hub_admin(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return grants.is_admin


def _topic(*actions: str) -> Decision:
    """Needs one of these actions on the topic of this name, or on the topic of this id if it has this name. An id that
    is not that of the named topic is refused by the call itself."""

    def decide(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
        name, id = _text(call, arguments, "topic"), arguments.get("topic_id")
        if any(grants.may(kind, name, action) for kind in ("topic", "topic-name") for action in actions):
            return True
        if not isinstance(id, str) or not any(grants.may("topic-id", id, action) for action in actions):
            return False
        return names.topic(id) == name

    return decide


def _topic_id(*actions: str) -> Decision:
    """Needs one of these actions on the topic with this id. An id that no topic has needs it on all topics."""

    def decide(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
        name = names.topic(_text(call, arguments, "topic_id"))
        return any(grants.may("topic", name, action) for action in actions)

    return decide


def _stage(*actions: str) -> Decision:
    """Needs one of these actions on the topic, or a capability to stage for it."""

    def decide(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
        name, id = _text(call, arguments, "topic"), arguments.get("topic_id")
        is_capable = isinstance(id, str) and grants.may("stage-id", id, "write") and names.topic(id) == name
        is_capable = is_capable or grants.may("stage-name", name, "write")
        return is_capable or _topic(*actions)(grants, names, call, arguments)

    return decide


def _remove(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    """As `_stage`; the call uses the id alone, so it must not be that of another topic than the named one. The topic
    may be deleted meanwhile."""
    id = _text(call, arguments, "topic_id")
    return _stage("write")(grants, names, call, arguments) and names.topic(id) in (None, arguments["topic"])


def _announce(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    """A feed says what a batch reads: needs the permission to read that topic."""
    try:
        id = wire.loads(_text(call, arguments, "feed").encode()).get("topic")
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{call}: feed is not a JSON object") from error
    if not isinstance(id, str):
        raise InvalidArgument(f"{call}: feed names no topic")
    name = names.topic(id)
    return grants.may("topic-id", id, "read") or any(grants.may(kind, name, "read") for kind in ("topic", "topic-name"))


def _create_topic(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    settings = arguments.get("settings")
    if not isinstance(settings, Mapping):
        raise InvalidArgument(f"{call}: settings must be an object")
    return grants.may("topic", _text(call, settings, "name"), "admin")


def _record(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    """Each event by what it names: a group, a queue or a topic. An event that names none of them needs a token that may
    write something."""
    return grants.is_writer and all(_may_record(grants, text) for text in _texts(call, arguments, "events"))


def _may_record(grants: Grants, text: str) -> bool:
    try:
        event = wire.loads(text.encode())
        fields = event.get("fields")
    except (ValueError, RecursionError):
        return True  # the call refuses it with an error that says why
    if not isinstance(fields, dict):
        return True
    if event.get("name") == "audit.copy_topic":  # its `topic` was only read
        fields = {"topic": fields.get("target")}
    for kind, actions in (("group", ("member",)), ("queue", ("put",)), ("topic", ("write", "admin"))):
        name = fields.get(kind)
        if isinstance(name, str):
            return any(grants.may(kind, name, action) for action in actions)
    return True


def _get(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return may_read(grants, names, _text(call, arguments, "key"))


def _scan(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return may_scan(grants, names, _text(call, arguments, "prefix"))


def _watch(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    return all(may_watch(grants, names, each) for each in _texts(call, arguments, "prefixes"))


def _commit(grants: Grants, names: Names, call: str, arguments: Arguments) -> bool:
    ephemeral = _mapping(call, arguments, "ephemeral")
    put = {**_mapping(call, arguments, "put"), **ephemeral}

    def value_of(key: str) -> bytes:
        try:
            return wire.bytes_of(put[key])
        except ValueError as error:
            raise InvalidArgument(f"{call}: a value is not a base64 string") from error

    expect, delete = _mapping(call, arguments, "expect"), _texts(call, arguments, "delete")
    if len({*expect, *put, *delete}) > KEYS_MAX:
        raise CommitTooLarge(f"{call}: a commit may name at most {KEYS_MAX:,} keys: split it into several commits")
    return may_commit(grants, names, expect, put.keys(), ephemeral.keys(), delete, value_of)


def _text(call: str, arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise InvalidArgument(f"{call}: {name} must be a string")
    return value


def _texts(call: str, arguments: Arguments, name: str) -> Collection[str]:
    found = arguments.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidArgument(f"{call}: {name} must be a list of strings")
    return found


def _mapping(call: str, arguments: Arguments, name: str) -> Mapping[str, Any]:
    found = arguments.get(name, {})
    if not isinstance(found, Mapping):
        raise InvalidArgument(f"{call}: {name} must be an object")
    return found


CALLS: Final[Mapping[str, Decision]] = {
    "server.ping": _anyone,
    "hub.identity": _identity,
    "log.topics": _anyone,  # the answer has the topics that the caller may describe
    "log.damaged_topics": _anyone,
    "log.topic": _stage("describe", "read"),
    "log.create_topic": _create_topic,
    "log.alter_topic": _topic("admin"),
    "log.delete_topic": _topic("admin"),
    "topic.bounds": _topic("describe", "read"),
    "topic.owners": _stage("describe", "read", "write"),
    "topic.offset_at": _topic("describe", "read"),
    "topic.plan_retention": _topic("admin"),
    "topic.trim": _hub_admin,
    "topic.check_writable": _stage("write"),
    "topic.retention_problem": _topic("describe"),
    "topic.subscribe": _topic("describe", "read"),
    "topic.unsubscribe": _anyone,
    "events.record": _record,
    "registry.get": _get,
    "registry.scan": _scan,
    "registry.commit": _commit,
    "registry.sql": _writer,
    "registry.lease": _writer,
    "registry.attach": _writer,
    "registry.renew": _writer,
    "registry.end": _writer,
    "registry.watch": _watch,
    "registry.unwatch": _anyone,
    "capability.create": _anyone,  # it permits no more than the caller's own token
    "capability.end": _anyone,  # of the caller's own
    "staging.check_writable": _writer,
    "staging.announce": _announce,
    "staging.feeds": _writer,
    "staging.stage": _stage("write"),
    "staging.read": _topic("write"),
    "staging.make_durable": _topic_id("write"),
    "staging.publish": _topic("write"),
    "staging.remove": _remove,
    "staging.clear": _topic_id("write"),
    "staging.forget_query": _topic_id("write"),
    "staging.sweep": _topic_id("write"),
    "staging.keep_topic": _topic_id("write"),
    "staging.topics": _hub_admin,
    "staging.changed_at": _hub_admin,
    "staging.forget_topic": _hub_admin,
    "DoGet": _topic("read"),
    "DoPut": _topic("write"),
    "DoExchange": _anyone,  # each call in the stream is decided by itself
    "ListFlights": _anyone,
    "ListActions": _anyone,
    "GetFlightInfo": _topic("describe", "read"),
    "GetSchema": _anyone,
}
"""What each call needs."""
