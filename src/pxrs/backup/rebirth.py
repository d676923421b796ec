"""The keys that a restored hub gets, from those of a backup. Nothing here does I/O.

The restored hub is another hub than the one that was copied, which may still be running: it has an id of its own, and
its registry has an id of its own, so that no process takes one for the other (decision 0011, O2). What changes:

| key | what becomes of it |
|---|---|
| `spark/registry`, the registry's id | left out; the new registry gets another one |
| `upkeep/...` | left out: an election, and the report of a round, of the copied hub |
| `groups/<group>/hub` | names the new hub |
| `groups/<group>/owners/...` | the epoch is raised, see below; one is written for each checkpoint that has none |
| `spark/routed/<hub>.<query>` | the new hub's id takes the place of the old one |
| `groups/<group>/...` of a group of another hub that shared the registry | left out: its topics are not here |
| every other key | stays as it is |

Versions are new, given by the new store. No value refers to a version. Values refer to incarnations, leases and takers
by ids, whose ephemeral keys are not in a backup: so all members, takers and leaders count as gone, partitions are
claimed again, items in flight are returned, and staged batches finished, as after a crash of all processes.

Epochs are in values, and users put `message.epoch` into writes of their own to fence stale ones. The copied hub may
have gone on to higher epochs after the backup. A restored hub that counted on from the epochs of the backup would give
out epochs that such a fence refuses, or worse, that two owners have had. So epochs rise by EPOCH_STEP, and to the time
of the restoration at least, in seconds (`epoch_at`): the same backup may have been restored before, and that hub has
used the epochs behind the step. A group that is not in the backup has no epochs that could be raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from pxrs.errors import RegistryCorrupt
from pxrs.group.records import Home, Owner
from pxrs.publishing.records import routed_prefix
from pxrs.registry.identity import REGISTRY_ID

EPOCH_STEP: Final = 1_000_000
"""More hand-overs of one partition than the copied hub makes after the backup: one in each second of eleven days."""
_EPOCHS_SINCE_S: Final = 1_577_836_800
"""The year 2020, in seconds since 1970: counted from then, times fit 32 bits for as long as epochs are stored in such
columns."""
_GROUP: Final = re.compile(r"groups/([^/]+)/(.+)")


class Reborn(NamedTuple):
    keys: dict[str, bytes]
    left_out: tuple[str, ...]
    """The names of groups of other hubs."""


def epoch_at(wall_s: float) -> int:
    """The least epoch in a hub that is restored at this time. Greater than all that an earlier restoration of the same
    backup has given out, unless a partition changed its owner more than once in each second since."""
    return max(0, int(wall_s) - _EPOCHS_SINCE_S)


def reborn(keys: Mapping[str, bytes], old: str, new: str, place: str, epoch_min: int) -> Reborn:
    """The keys of the restored hub.

    old, new:  the ids of the copied hub and of the restored one. place: where the restored one is, to be shown.
    epoch_min: the least epoch of an owner (`epoch_at`)."""
    foreign = {name for key, value in keys.items() if (name := _named_by_home(key)) and _is_foreign(value, old)}
    found: dict[str, bytes] = {}
    for key, value in keys.items():
        group = _GROUP.fullmatch(key)
        if key == REGISTRY_ID or key.startswith("upkeep/") or (group and group[1] in foreign):
            continue
        if group and group[2] == "hub":
            value = Home(new, place).dump() if _home(key, value).hub else value
        elif group and group[2].startswith("owners/"):
            value = _later_epoch(key, value, epoch_min)
        elif old and key.startswith(routed_prefix(old)):
            key = routed_prefix(new) + key.removeprefix(routed_prefix(old))
        found[key] = value
        if group and group[2].startswith("checkpoints/"):
            owner = f"groups/{group[1]}/owners/{group[2].removeprefix('checkpoints/')}"
            if owner not in keys:  # nobody had claimed the partition yet; in the copied hub a member may have since
                found[owner] = Owner(None, epoch_min).dump()
    return Reborn(dict(sorted(found.items())), tuple(sorted(foreign)))


def _named_by_home(key: str) -> str:
    """The group whose key `hub` this is; empty if it is another key."""
    group = _GROUP.fullmatch(key)
    return group[1] if group is not None and group[2] == "hub" else ""


def _home(key: str, value: bytes) -> Home:
    try:
        return Home.load(key, value)
    except RegistryCorrupt:
        return Home()  # left as it is: the group reports it


def _is_foreign(value: bytes, hub: str) -> bool:
    return _home("", value).hub not in ("", hub)


def _later_epoch(key: str, value: bytes, epoch_min: int) -> bytes:
    try:
        owner = Owner.load(key, value)
        return replace(owner, epoch=max(owner.epoch + EPOCH_STEP, epoch_min)).dump()
    except (RegistryCorrupt, TypeError):
        return value  # the group reports it
