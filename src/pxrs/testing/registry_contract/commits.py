"""Commits: expectations, limits, bad input."""

from __future__ import annotations

import os

import pytest

from pxrs.errors import (
    CommitTooLarge,
    Conflict,
    InvalidCommit,
    InvalidKey,
    ValueTooLarge,
)
from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract.store import Fixtures


class Commits(Fixtures):
    def test_a_commit_with_the_right_versions_passes(self, registry: Registry) -> None:
        first = registry.commit(expect={"a": ABSENT, "b": ABSENT}, put={"a": b"1", "b": b"1"})
        second = registry.commit(expect=first, put={"a": b"2"}, delete=["b"])
        registry.commit(expect={"a": second["a"], "b": ABSENT}, put={"c": b"3"})
        assert [(e.key, e.value) for e in registry.scan("")] == [("a", b"2"), ("c", b"3")]

    def test_a_conflict_names_the_keys_and_writes_nothing(self, registry: Registry) -> None:
        versions = registry.commit(put={"a": b"1", "b": b"1", "c": b"1"})
        registry.commit(put={"b": b"2"})
        with pytest.raises(Conflict) as conflict:
            registry.commit(expect={**versions, "d": ABSENT}, put={"a": b"3", "d": b"3"}, delete=["c"])
        assert conflict.value.keys == ("b",)
        assert [(e.key, e.value) for e in registry.scan("")] == [("a", b"1"), ("b", b"2"), ("c", b"1")]

    def test_expecting_absent_what_is_there_conflicts(self, registry: Registry) -> None:
        registry.commit(put={"a": b"1"})
        with pytest.raises(Conflict) as conflict:
            registry.commit(expect={"a": ABSENT, "b": ABSENT}, put={"b": b"x"})
        assert conflict.value.keys == ("a",)
        assert registry.get("b") is None

    def test_expecting_what_is_gone_conflicts(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"})["a"]
        registry.commit(delete=["a"])
        for write in ({"put": {"a": b"2"}}, {"put": {"b": b"2"}}, {"delete": ["a"]}):
            with pytest.raises(Conflict) as conflict:
                registry.commit(expect={"a": version}, **write)
            assert conflict.value.keys == ("a",)
        assert registry.scan("") == []

    def test_a_stale_version_conflicts_however_old(self, registry: Registry) -> None:
        stale = [registry.commit(put={"a": b"%d" % i})["a"] for i in range(4)]
        for version in stale[:-1]:
            with pytest.raises(Conflict):
                registry.commit(expect={"a": version}, put={"a": b"late"})
        registry.commit(expect={"a": stale[-1]}, put={"a": b"in time"})

    def test_a_commit_may_only_look(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"})["a"]
        assert registry.commit(expect={"a": version, "b": ABSENT}) == {}
        with pytest.raises(Conflict):
            registry.commit(expect={"a": version, "b": version})
        assert [e.key for e in registry.scan("")] == ["a"]
        assert registry.commit() == {}

    def test_a_quiet_commit_is_a_commit(self, registry: Registry) -> None:
        version = registry.commit(put={"a": b"1"}, quiet=True)["a"]
        assert registry.commit(expect={"a": version}, put={"a": b"2"}, quiet=True)["a"] != version

    def test_the_most_keys_fit_into_one_commit(self, registry: Registry) -> None:
        keys = [f"many/{i:04}" for i in range(registry.limits.commit_keys_max)]
        versions = registry.commit(expect=dict.fromkeys(keys, ABSENT), put=dict.fromkeys(keys, b"1"))
        assert [e.key for e in registry.scan("many/")] == keys
        registry.commit(expect=versions, delete=keys)
        assert registry.scan("many/") == []

    def test_the_largest_value_fits(self, registry: Registry) -> None:
        value = os.urandom(registry.limits.value_bytes_max)
        version = registry.commit(put={"v": value})["v"]
        entry = registry.get("v")
        assert entry is not None
        assert entry.value == value
        registry.commit(expect={"v": version}, put={"v": b"small"})

    def test_the_most_bytes_fit(self, registry: Registry) -> None:
        limits = registry.limits
        count = -(-limits.commit_bytes_max // limits.value_bytes_max)
        size = limits.commit_bytes_max // count - len("k00")
        keys = [f"k{i:02}" for i in range(count)]
        registry.commit(put=dict.fromkeys(keys, b"x" * size))
        assert [len(e.value) for e in registry.scan("")] == [size] * count


class BadInput(Fixtures):
    BAD_KEYS = (
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "..",
        "a/../b",
        "./a",
        "a b",
        "a\n",
        "a\0b",
        "a;b",
        "ü",
        "x" * 513,
    )

    @pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
    def test_a_bad_key_is_refused_everywhere(self, registry: Registry, key: str) -> None:
        with pytest.raises(InvalidKey):
            registry.get(key)
        for bad in ({"put": {key: b""}}, {"expect": {key: ABSENT}}, {"delete": [key]}):
            with pytest.raises(InvalidKey):
                registry.commit(**{"put": {"good": b""}, **bad})  # type: ignore[arg-type]
        assert registry.scan("") == []

    @pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "ü/"], ids=repr)
    def test_a_bad_prefix_is_refused(self, registry: Registry, prefix: str) -> None:
        with pytest.raises(InvalidKey):
            registry.scan(prefix)

    def test_a_watch_needs_a_prefix(self, registry: Registry) -> None:
        for prefixes in ((), ("a//",), ("a", "..")):
            with pytest.raises(InvalidKey):
                registry.watch(*prefixes)

    def test_ten_megabytes_are_refused_and_nothing_is_written(self, registry: Registry) -> None:
        with pytest.raises(ValueTooLarge):
            registry.commit(put={"small": b"", "large": b"x" * 10_000_000})
        assert registry.scan("") == []

    def test_too_much_in_one_commit_is_refused(self, registry: Registry) -> None:
        limits = registry.limits
        with pytest.raises(CommitTooLarge):
            registry.commit(put={f"k{i}": b"" for i in range(limits.commit_keys_max + 1)})
        count = limits.commit_bytes_max // limits.value_bytes_max + 1
        with pytest.raises(CommitTooLarge):
            registry.commit(put={f"k{i}": b"x" * limits.value_bytes_max for i in range(count)})
        assert registry.scan("") == []

    def test_a_commit_that_contradicts_itself_is_refused(self, registry: Registry) -> None:
        with registry.lease(10) as lease:
            for contradiction in (
                {"put": {"a": b""}, "delete": ["a"]},
                {"put": {"a": b""}, "ephemeral": {"a": b""}, "lease": lease},
                {"ephemeral": {"a": b""}},
                {"put": {"a": "text"}},
                {"expect": {"a": None}},
                {"expect": {"a": -1}},
            ):
                with pytest.raises(InvalidCommit):
                    registry.commit(**contradiction)
        assert registry.scan("") == []

    @pytest.mark.parametrize("ttl", [0, -1, 0.01, float("nan"), float("inf")])
    def test_a_useless_ttl_is_refused(self, registry: Registry, ttl: float) -> None:
        with pytest.raises(ValueError, match="ttl"):
            registry.lease(ttl)
