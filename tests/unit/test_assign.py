"""Who should have what: fair, with the fewest moves, and the same everywhere (X4)."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import pxrs
from pxrs.cli.restarts import is_final
from pxrs.errors import AssignorFailed, InvalidGroup
from pxrs.group.assign import ASSIGNORS, _found, assignor_named, sticky
from pxrs.group.records import Keys
from pxrs.testing.simulator import fewest_moves
from pxrs.testing.waiting import eventually

SIZES = {1: [8], 2: [4, 4], 3: [3, 3, 2], 4: [2, 2, 2, 2], 5: [2, 2, 2, 1, 1], 10: [1] * 8 + [0, 0]}


def sizes(members: list[str], targets: list[str | None]) -> list[int]:
    return sorted((targets.count(member) for member in members), reverse=True)


def moves(before: list[str | None], after: list[str | None]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ASSIGNORS)
@pytest.mark.parametrize(("count", "expected"), SIZES.items())
def test_x4_eight_partitions_are_shared_fairly(name: str, count: int, expected: list[int]) -> None:
    members = [f"m{number}" for number in range(count)]
    assert sizes(members, assignor_named(name)(members, 8, [])) == expected


@pytest.mark.parametrize("name", ASSIGNORS)
def test_without_members_nothing_is_meant_for_anybody(name: str) -> None:
    assert assignor_named(name)([], 3, ["gone"] * 3) == [None] * 3


@pytest.mark.parametrize("name", ASSIGNORS)
def test_x4_the_same_input_gives_the_same_assignment(name: str) -> None:
    before: list[str | None] = ["b", "b", None, "gone", "a"]
    assign = assignor_named(name)
    assert assign(["a", "b", "c"], 5, before) == assign(["a", "b", "c"], 5, list(before))


def test_x4_sticky_moves_as_few_as_any_fair_assignment_could() -> None:
    """Against every fair assignment of small groups."""
    for count, partitions in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        members = [f"m{number}" for number in range(count)]
        every: list[list[str | None]] = [list(each) for each in itertools.product(members, repeat=partitions)]
        fair = [each for each in every if max(sizes(members, each)) - min(sizes(members, each)) <= 1]
        for before in itertools.product([*members, "gone", None], repeat=partitions):
            found = sticky(members, partitions, before)
            fewest = min(moves(list(before), each) for each in fair)
            assert found in fair
            assert moves(list(before), found) == fewest
            assert fewest == fewest_moves([before.count(member) for member in members], partitions)


def test_x4_sticky_moves_the_fewest_in_large_groups() -> None:
    rng = random.Random(7)
    for _ in range(300):
        members = [f"m{number}" for number in range(rng.randint(1, 20))]
        partitions = rng.randint(1, 64)
        before = [rng.choice([*members, "gone", None]) for _ in range(partitions)]
        found = sticky(members, partitions, before)
        assert max(sizes(members, found)) - min(sizes(members, found)) <= 1
        assert moves(before, found) == fewest_moves([before.count(member) for member in members], partitions)


def test_x5_sticky_leaves_a_fair_assignment_as_it_is() -> None:
    members = ["a", "b", "c"]
    found = sticky(members, 8, [])
    assert sticky(members, 8, found) == found
    assert sticky(list(reversed(members)), 8, found) == found


def test_an_unknown_assignor_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidGroup, match="choose from sticky, range, round-robin, or install the package"):
        assignor_named("best")


# Assignors of installed packages.

PLUGINS = """
def last(members, partitions, before):
    return [members[-1]] * partitions

def one_short(members, partitions, before):
    return [members[0]] * (partitions - 1)

def one_more(members, partitions, before):
    return [members[0]] * (partitions + 1)

def to_nobody(members, partitions, before):
    return [members[0]] * (partitions - 1) + [None]

def to_a_stranger(members, partitions, before):
    return [members[0]] * (partitions - 1) + ["mallory"]

def to_two(members, partitions, before):
    return [list(members)] * partitions

def nothing(members, partitions, before):
    return None

def raises(members, partitions, before):
    raise KeyError("rack")

number = 5
"""
FAULTS = {
    "one-short": "it assigned 3 partitions, but there are 4",
    "one-more": "it assigned 5 partitions, but there are 4",
    "to-nobody": "it assigned partition 3 to None",
    "to-a-stranger": "it assigned partition 3 to 'mallory', which is not a member",
    "to-two": "it assigned partition 0 to ",
    "nothing": "it raised TypeError",
    "raises": "it raised KeyError('rack')",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with assignors; its path, to install more there."""
    install(tmp_path, "racks", PLUGINS, "last", *FAULTS, "number", "absent")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    _found.cache_clear()


def install(path: Path, name: str, source: str, *assignors: str) -> None:
    (path / f"{name}_assignors.py").write_text(source)
    info = path / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    points = [f"{each} = {name}_assignors:{each.replace('-', '_')}" for each in assignors]
    (info / "entry_points.txt").write_text("\n".join(["[pxrs.assignors]", *points, ""]))


def test_f7_an_installed_package_brings_an_assignor(package: Path) -> None:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=4)
        with hub.consumer("t", "g", assignor="last") as first:
            eventually(lambda: first.assignment == [0, 1, 2, 3])
            with hub.consumer("t", "g", assignor="last") as second:
                eventually(lambda: second.assignment == [0, 1, 2, 3])
                assert first.assignment == []


def test_f7_the_example_package_of_the_documents_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/groups.md").read_text()
    (project,) = re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (module,) = (
        each for each in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "pairs" in each
    )
    points = tomllib.loads(project)["project"]["entry-points"]
    (tmp_path / "shop_placement.py").write_text(module)
    info = tmp_path / "shop_placement-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop-placement\nVersion: 1\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {of}\n" for name, of in each.items()) for group, each in points.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=4, partitioner="by-region")
        with hub.producer("t") as out:
            assert out.send(b"x", key=b"6-30").result(30)[0] == 2
        with (
            hub.consumer("t", "g", assignor="pairs") as first,
            hub.consumer("t", "g", assignor="pairs") as second,
        ):
            eventually(lambda: (first.assignment, second.assignment) == ([0, 1], [2, 3]))
    _found.cache_clear()


def test_f7_an_assignor_that_cannot_be_loaded_is_refused(package: Path) -> None:
    with pytest.raises(InvalidGroup, match=r"assignor 'absent': loading racks_assignors:absent failed: AttributeError"):
        assignor_named("absent")
    with pytest.raises(InvalidGroup, match=r"assignor 'number': racks_assignors:number is a int, not a function"):
        assignor_named("number")
    with pytest.raises(InvalidGroup, match=r"choose from sticky, range, round-robin, absent, last, .*, to-two, or"):
        assignor_named("best")
    install(package, "shelves", PLUGINS, "last", "sticky")
    with pytest.raises(
        InvalidGroup, match=r"packages define it differently: racks_assignors:last, shelves_assignors:last"
    ):
        assignor_named("last")
    assert assignor_named("sticky") is sticky, "no package replaces one of pxrs"


@pytest.mark.parametrize("name", FAULTS)
def test_f7_a_faulty_assignor_assigns_nothing_and_every_member_is_told(package: Path, name: str) -> None:
    with pxrs.open("memory:") as hub:
        hub.create_topic("t", partitions=4)
        inbox = hub.consumer("t", "g", assignor=name)
        with pytest.raises(AssignorFailed) as failure:
            inbox.poll(timeout=30)
        assert FAULTS[name] in failure.value.reason
        assert hub.registry.scan(Keys("g").targets) == []
        assert hub.registry.scan(Keys("g").members) == [], "it has left"
        inbox.close()
    assert is_final(failure.value), "`pxrs worker` does not start it again and again"
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
