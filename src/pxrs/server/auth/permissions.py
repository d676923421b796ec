"""Grants: what a token permits, by kind, name and action. Nothing here does I/O.

    topic:orders=read        the topic `orders`
    topic:eu-*=write         every topic whose name begins with `eu-`
    group:*=member           every group
    queue:mail=put,read      two actions in one grant
    registry:tenants/eu/=write   keys of the registry that belong to no topic, group or queue
    cluster=member           the storage nodes of a cluster: for the cluster's own brokers
    hub=admin                everything

The actions of each kind, and which others each includes, are `ACTIONS`. docs/serve.md lists what each call needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from pxrs.errors import InvalidArgument
from pxrs.model import is_internal

ACTIONS: Final[Mapping[str, Mapping[str, frozenset[str]]]] = {
    "topic": {
        "describe": frozenset({"describe"}),
        "read": frozenset({"read", "describe"}),
        "write": frozenset({"write", "describe"}),
        "admin": frozenset({"admin", "read", "write", "describe"}),
    },
    "group": {
        "read": frozenset({"read"}),
        "member": frozenset({"member", "read"}),
        "admin": frozenset({"admin", "member", "read"}),
    },
    "queue": {
        "read": frozenset({"read", "describe"}),
        "put": frozenset({"put", "describe"}),
        "take": frozenset({"take", "put", "read", "describe"}),
        "admin": frozenset({"admin", "take", "put", "read", "describe"}),
    },
    "registry": {
        "read": frozenset({"read"}),
        "write": frozenset({"write", "read"}),
    },
    "cluster": {"member": frozenset({"member"})},
    "hub": {
        "read": frozenset({"read"}),
        "admin": frozenset({"admin", "read"}),
    },
}
"""By kind and action of a grant: the actions that it permits. `describe` of a queue is no action of a grant: all
actions of queues include it."""

_NAMELESS: Final = ("hub", "cluster")
"""The kinds whose grants name nothing: there is one of each."""
READING: Final = frozenset({"read", "describe"})
"""The actions that `hub=read` permits on everything."""
_DERIVED: Final[Mapping[str, frozenset[str]]] = {
    "topic-id": frozenset({"read"}),
    "topic-name": frozenset({"read"}),
    "stage-id": frozenset({"write"}),
    "stage-name": frozenset({"write"}),
}
"""Kinds of grants that only a capability has (`capabilities`): to read ranges of topics, and to stage rows for them."""
_BY_NAME: Final = ("topic", "topic-name", "stage-name")
"""The kinds of grants that name topics."""
_NAME: Final = re.compile(r"(\*|_?[A-Za-z0-9][A-Za-z0-9._-]{0,199}\*?)")
_PREFIX: Final = re.compile(r"([!-.0-:<-~]+/)+")
NAMES_MAX: Final = 10_000
NAME_CHARACTERS_MAX: Final = 512
"""For how many names, and of which length, `Grants` remembers what is permitted."""
GRANTS_MAX: Final = 1_000
"""How many grants one token may have."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One permission."""

    kind: str
    pattern: str
    """A name; or the beginning of names, then `*`. For `registry` a prefix that ends in a slash, for `hub` and
    `cluster` empty."""
    action: str

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.pattern}={self.action}" if self.pattern else f"{self.kind}={self.action}"

    def is_for(self, name: str) -> bool:
        if self.kind == "registry":
            return name.startswith(self.pattern)
        if self.kind == "topic" and is_internal(name):
            return name == self.pattern  # `topic:*` is for the topics of users
        return name.startswith(self.pattern[:-1]) if self.pattern.endswith("*") else name == self.pattern


def parse_grants(text: str) -> list[Grant]:
    """The grants that a text such as `queue:mail=put,read` stands for. Raises InvalidArgument."""
    subject, is_complete, actions = text.rpartition("=")
    kind, has_pattern, pattern = subject.partition(":")
    known = ACTIONS.get(kind)
    if not is_complete or known is None or bool(has_pattern) == (kind in _NAMELESS):
        raise InvalidArgument(
            f"{text!r} is not a grant: write KIND:NAME=ACTION, such as topic:orders=read, group:billing=member, "
            "queue:mail*=take, registry:tenants/eu/=write; or hub=read, hub=admin"
        )
    if kind == "registry" and not _PREFIX.fullmatch(pattern):
        raise InvalidArgument(f"{text!r}: the prefix of keys must end in a slash, such as registry:tenants/eu/=read")
    if kind not in ("registry", *_NAMELESS) and not _NAME.fullmatch(pattern):
        raise InvalidArgument(f"{text!r}: give a name, a prefix of names followed by *, or * alone")
    chosen = actions.split(",")
    for action in chosen:
        if action not in known:
            raise InvalidArgument(f"{text!r}: a {kind} has no action {action!r}; choose from {', '.join(known)}")
    return [Grant(kind, pattern, action) for action in dict.fromkeys(chosen)]


@dataclass(frozen=True)
class Grants:
    """All that one caller may do."""

    grants: tuple[Grant, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Grants:
        """Raises InvalidArgument."""
        found = tuple(grant for text in texts for grant in parse_grants(text))
        if len(found) > GRANTS_MAX:
            raise InvalidArgument(f"{len(found):,} grants for one token, the maximum is {GRANTS_MAX:,}: use patterns")
        return cls(found)

    @property
    def texts(self) -> list[str]:
        return [grant.text for grant in self.grants]

    @cached_property
    def is_admin(self) -> bool:
        return any(grant.kind == "hub" and grant.action == "admin" for grant in self.grants)

    @cached_property
    def is_reader(self) -> bool:
        """Whether everything may be read."""
        return any(grant.kind == "hub" for grant in self.grants)

    @cached_property
    def is_writer(self) -> bool:
        """Whether anything at all may be written. Only such a caller may have leases."""
        return any(grant.action not in READING for grant in self.grants if grant.kind not in _DERIVED)

    @cached_property
    def _by_right(self) -> dict[tuple[str, str], tuple[Grant, ...]]:
        """By kind and permitted action."""
        found: dict[tuple[str, str], list[Grant]] = {}
        for grant in self.grants:
            permitted = _DERIVED.get(grant.kind) or ACTIONS[grant.kind][grant.action]
            for action in permitted:
                found.setdefault((grant.kind, action), []).append(grant)
        return {right: tuple(grants) for right, grants in found.items()}

    def may(self, kind: str, name: str | None, action: str) -> bool:
        """Whether the action is permitted on what has this name. None: it is not known which name it has, so that it is
        permitted only to who may do it to all names. To write to an internal topic is permitted to nobody: the call
        `events.record` does that."""
        if action == "write" and kind in _BY_NAME and name is not None and is_internal(name):
            return False
        if self.is_admin or (self.is_reader and action in READING):
            return True
        known = self._known.get((kind, name))
        if known is None and name is not None and len(name) > NAME_CHARACTERS_MAX:
            return action in self._actions(kind, name)  # a client chose it: what is remembered is bounded
        if known is None:
            if len(self._known) >= NAMES_MAX:
                self._known.clear()
            known = self._known[kind, name] = self._actions(kind, name)
        return action in known

    @cached_property
    def _known(self) -> dict[tuple[str, str | None], frozenset[str]]:
        """What `_actions` has returned: the same few names are asked for again and again."""
        return {}

    def _actions(self, kind: str, name: str | None) -> frozenset[str]:
        """The actions that the grants of this kind permit on this name."""
        return frozenset(
            action
            for (of, action), granted in self._by_right.items()
            if of == kind and any(grant.pattern == "*" if name is None else grant.is_for(name) for grant in granted)
        )

    @cached_property
    def has_prefixes(self) -> bool:
        """Whether there is a grant of kind `registry`."""
        return any(grant.kind == "registry" for grant in self.grants)

    def may_any(self, kind: str, action: str) -> bool:
        """Whether the action is permitted on at least one name."""
        return self.is_admin or (self.is_reader and action in READING) or (kind, action) in self._by_right

    def patterns(self, kind: str, action: str) -> list[str]:
        """The patterns of names for which the action is permitted, in order, without those that others include."""
        if self.is_admin or (self.is_reader and action in READING):
            return ["*"]
        given = sorted({grant.pattern for grant in self._by_right.get((kind, action), ())})
        wide = [pattern[:-1] for pattern in given if pattern.endswith("*")]
        return [
            pattern
            for pattern in given
            if not any(pattern.rstrip("*").startswith(each) and pattern != f"{each}*" for each in wide)
        ]
