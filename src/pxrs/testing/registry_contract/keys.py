"""Keys, values, versions, scans."""

from __future__ import annotations

import pytest

from pxrs.registry import ABSENT, Registry
from pxrs.testing.registry_contract.store import Fixtures, Store


class Keys(Fixtures):
    def test_an_unknown_key_is_none(self, registry: Registry) -> None:
        assert registry.get("nothing/here") is None
        assert registry.scan("nothing/") == []

    def test_what_was_put_is_read_back_with_its_version(self, registry: Registry) -> None:
        versions = registry.commit(put={"a": b"1", "b/c": b"2"})
        assert versions.keys() == {"a", "b/c"}
        for key, value in {"a": b"1", "b/c": b"2"}.items():
            entry = registry.get(key)
            assert entry is not None
            assert (entry.key, entry.value, entry.version) == (key, value, versions[key])

    def test_every_write_changes_the_version(self, registry: Registry) -> None:
        seen = [registry.commit(put={"a": b"same"})["a"] for _ in range(5)]
        registry.commit(delete=["a"])
        seen += [registry.commit(put={"a": b"same"})["a"] for _ in range(3)]
        assert len(set(seen)) == len(seen)
        assert ABSENT not in seen

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), "ü€😀".encode()], ids=repr)
    def test_values_are_any_bytes(self, registry: Registry, value: bytes) -> None:
        registry.commit(put={"v": value})
        entry = registry.get("v")
        assert entry is not None
        assert entry.value == value
        assert registry.scan("") == [entry]

    def test_a_key_may_also_be_a_folder(self, registry: Registry) -> None:
        registry.commit(put={"a/b": b"below"})
        registry.commit(put={"a": b"above"})
        registry.commit(put={"a/b/c": b"deep"})
        assert [(e.key, e.value) for e in registry.scan("")] == [
            ("a", b"above"),
            ("a/b", b"below"),
            ("a/b/c", b"deep"),
        ]
        assert [e.key for e in registry.scan("a/")] == ["a/b", "a/b/c"]

    def test_delete_removes_and_an_absent_key_is_no_error(self, registry: Registry) -> None:
        registry.commit(put={"a": b"", "b": b""})
        registry.commit(delete=["a", "never"])
        assert registry.get("a") is None
        assert registry.get("b") is not None

    def test_put_and_delete_in_one_commit(self, registry: Registry) -> None:
        version = registry.commit(put={"from": b"x"})["from"]
        registry.commit(expect={"from": version, "to": ABSENT}, put={"to": b"x"}, delete=["from"])
        assert [e.key for e in registry.scan("")] == ["to"]

    def test_namespaces_are_worlds_apart(self, store: Store, registry: Registry) -> None:
        other = store.open(store.namespace + "x")
        registry.commit(put={"a": b"here"})
        assert other.get("a") is None
        other.commit(expect={"a": ABSENT}, put={"a": b"there"})
        assert [e.value for e in registry.scan("")] == [b"here"]


class Scans(Fixtures):
    KEYS = (
        "a",
        "a-b",
        "a/b",
        "a/b-c",
        "a/b/c",
        "a/c",
        "a0",
        "ab",
        "b/0",
        "b/1",
        "b/10",
        "b/2",
        "B",
        "~/x",
        "!/y",
    )

    def test_scan_is_in_byte_order_of_keys(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(self.KEYS, b""))
        assert [e.key for e in registry.scan("")] == sorted(self.KEYS)
        assert [e.key for e in registry.scan("a/")] == ["a/b", "a/b-c", "a/b/c", "a/c"]
        assert [e.key for e in registry.scan("b/")] == ["b/0", "b/1", "b/10", "b/2"]

    def test_after_and_limit_page_through(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(self.KEYS, b""))
        for size in (1, 2, 3, 100):
            pages, after = [], None
            while page := registry.scan("", after=after, limit=size):
                assert len(page) <= size
                pages += [e.key for e in page]
                after = page[-1].key
            assert pages == sorted(self.KEYS)

    def test_after_need_not_be_a_key_that_exists(self, registry: Registry) -> None:
        registry.commit(put=dict.fromkeys(("p/a", "p/c", "q/a"), b""))
        assert [e.key for e in registry.scan("p/", after="p/b")] == ["p/c"]
        assert [e.key for e in registry.scan("p/", after="a")] == ["p/a", "p/c"]
        assert registry.scan("p/", after="q") == []

    def test_scan_gives_values_and_versions(self, registry: Registry) -> None:
        registry.commit(put={f"n/{i:03}": b"%d" % i for i in range(100)})
        for entry in registry.scan("n/"):
            assert registry.get(entry.key) == entry

    @pytest.mark.parametrize("limit", [0, -1])
    def test_a_useless_limit_is_refused(self, registry: Registry, limit: int) -> None:
        with pytest.raises(ValueError, match="limit"):
            registry.scan("", limit=limit)
