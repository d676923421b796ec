"""Which groups a registry has, and which members read a topic. Apart from `admin.py`, so that a process that only looks
need not import what changes a group."""

from __future__ import annotations

from pxrs.group.records import GROUP_NAME, Keys, Member
from pxrs.registry.contract import Registry


def groups(registry: Registry, *, deleted: bool = False) -> list[str]:
    """The names of all groups that have members or checkpoints, in order. deleted: also of those that have neither any
    more: their owner keys stay (`GroupHandle.delete`)."""
    found = []
    after = None
    # Skip from the first key of one group to the next group, because a group may have many keys: '0' is the character
    # after '/'.
    while entries := registry.scan("groups/", after, 1):
        name = entries[0].key.split("/")[1]
        after = f"groups/{name}0"
        if GROUP_NAME.fullmatch(name):
            keys = Keys(name)
            if deleted or registry.scan(keys.checkpoints, limit=1) or registry.scan(keys.members, limit=1):
                found.append(name)
    return sorted(found)


def members_of(registry: Registry, topic: str) -> list[tuple[str, str]]:
    """The members of all groups that read the topic or source with this id: (group, member's name)."""
    found = []
    for group in groups(registry):
        for entry in registry.scan(Keys(group).members):
            member = Member.load(entry.key, entry.value)
            if topic in member.topics:
                found.append((group, member.name))
    return found
