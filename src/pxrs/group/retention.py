"""The registry operations of retention, before it removes anything from a topic with `keep_unread` (O10).

A group may be given a checkpoint while retention decides, so each must notice the other:

    retention                                   pin, reset or import of a checkpoint
    1. reads `gate`                             1. reads `start`
    2. reads `start` and all checkpoints        2. chooses offsets that are not before it
    3. commits the new `start`,                 3. commits the checkpoints and a new `gate`,
       expecting `gate` and `start`                expecting `start`
    4. removes what lies before it

If step 3 of the right side comes first, step 3 of the left side is refused, unless `gate` was read later; and then the
checkpoints were read later too, and include the new ones. If step 3 of the left side comes first, step 3 of the right
side is refused, and its offsets are chosen anew. Checkpoints that owners commit only go forward: they concern neither
side, and do not write the gate. A process that dies before step 4 leaves `start` for the next retention, which removes
what lies before it.

A topic can be given `keep_unread` while members and administrators run that read its settings before. So not the
setting but the key `gate` decides whether the right side writes it: retention makes the key before its first step 3,
and where the key is missing, a commit of checkpoints expects it ABSENT. Such a commit comes before the key is made, and
then retention, which reads all checkpoints afterwards, sees it; or it is refused, and made again with the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from pxrs.errors import Conflict, RetentionPostponed
from pxrs.group.incarnation import ATTEMPTS_MAX
from pxrs.group.records import GROUP_NAME, Checkpoint, Gate, Keys, Starts, gate_key, start_key
from pxrs.registry.contract import ABSENT, Entry
from pxrs.registry.steps import Get, Scan, Steps, Write


def move_start(topic: str, plan: Callable[[Mapping[int, int]], Mapping[int, int]]) -> Steps[dict[int, int]]:
    """Commit the starts that `plan` chooses for the topic with this id, given the first offset in each partition that
    some group has yet to read. Returns the starts of all partitions; what lies before them may be removed.

    Raises RetentionPostponed if the gate changes again and again."""
    for _ in range(ATTEMPTS_MAX):
        # Read first: a checkpoint that is pinned after it makes the commit fail.
        gate: Entry | None = yield Get(gate_key(topic))
        entry: Entry | None = yield Get(start_key(topic))
        starts = Starts() if entry is None else Starts.load(entry.key, entry.value)
        planned = plan((yield from unread(topic)))
        moved = {str(number): start for number, start in sorted(planned.items()) if start > starts.of(number)}
        if moved and gate is None:
            # From now on every commit of checkpoints writes the gate. What was committed before is read below.
            with suppress(Conflict):  # another process has made it
                made = {gate_key(topic): Gate("retention").dump()}
                yield Write({gate_key(topic): ABSENT}, made, is_leased=False, is_quiet=True)
            continue
        if moved and gate is not None:
            expect = {
                gate_key(topic): gate.version,
                start_key(topic): ABSENT if entry is None else entry.version,
            }
            starts = Starts({**starts.offsets, **moved})
            try:
                yield Write(expect, {start_key(topic): starts.dump()}, is_leased=False, is_quiet=True)
            except Conflict:
                continue
        return {int(number): start for number, start in starts.offsets.items()}
    raise RetentionPostponed(
        f"groups got new checkpoints of topic {topic} {ATTEMPTS_MAX} times while its retention was reading the "
        "checkpoints; retention is tried again later"
    )


def unread(topic: str) -> Steps[dict[int, int]]:
    """For each partition of the topic with this id, the first offset that some group has yet to read."""
    found: dict[int, int] = {}
    after = None
    # Skip from the first key of one group to the next group, because a group may have many keys: '0' is the character
    # after '/'.
    while entries := (yield Scan("groups/", after, 1)):
        name = entries[0].key.split("/")[1]
        after = f"groups/{name}0"
        if GROUP_NAME.fullmatch(name):
            for entry in (yield Scan(f"{Keys(name).checkpoints}{topic}/")):
                number = int(entry.key.rpartition("/")[2])
                offset = Checkpoint.load(entry.key, entry.value).offset
                found[number] = min(offset, found.get(number, offset))
    return found
