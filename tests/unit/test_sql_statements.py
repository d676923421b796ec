"""The SQL registry without a database: its statements, its plans, and what it makes of errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import oracledb
import pytest

from pxrs import registry as registries
from pxrs.errors import (
    AccessDenied,
    Conflict,
    InvalidUrl,
    LeaseExpired,
    OutcomeUnknown,
    RegistryCorrupt,
    RegistryError,
    RegistryUnavailable,
    SchemaMissing,
    StorageFull,
)
from pxrs.registry.address import parse
from pxrs.registry.contract import ABSENT, Commit
from pxrs.registry.sql import ddl
from pxrs.registry.sql.commit import CommitPlan, LeasesDue, common_folder, parse_payload, payload
from pxrs.registry.sql.database import ConnectionLost, Gate, Row, TransactionAborted
from pxrs.registry.sql.oracle import OracleDatabase, OracleSession
from pxrs.registry.sql.postgresql import PostgresDatabase
from pxrs.registry.sql.schema import DIALECTS, DialectName
from pxrs.registry.sql.statements import Call, Statement, Statements, key_range, statements_for
from pxrs.registry.sql.watching import Poller
from pxrs.registry.sql.wire import Reply
from pxrs.registry.watch import SharedWatches, Watch

ALL = [
    pytest.param(dialect, field.name, id=f"{dialect}-{field.name}")
    for dialect in DIALECTS
    for field in dataclasses.fields(Statements)
    if field.name not in ("dialect", "direct")
]


class TestStatements:
    @pytest.mark.parametrize(("dialect", "name"), ALL)
    def test_every_statement_compiles_for_every_database(self, dialect: DialectName, name: str) -> None:
        statement = getattr(statements_for(dialect), name)
        if statement is None:
            assert (name, dialect) in {
                ("store_version", "postgresql"),
                ("store_version", "oracle"),
                ("notify", "sqlite"),
                ("notify", "oracle"),
            }
            return
        marks = {"postgresql": r"\$\d+", "oracle": r":(\w+)", "sqlite": r":(\w+)"}[dialect]
        # Casts and times of day also have colons.
        used = set(re.findall(marks, re.sub(r"::\w+|'[^']*'", "", statement.text)))
        assert len(used) == len(statement.parameters) if dialect == "postgresql" else not statement.parameters
        assert statement.returns_rows == statement.text.startswith("SELECT")
        assert statement.is_timed == (":now_ms" in statement.text)

    def test_where_one_statement_does_it_all_it_compares_and_tells(self) -> None:
        assert statements_for("sqlite").direct is statements_for("oracle").direct is None
        direct = statements_for("postgresql").direct
        assert direct is not None
        for statement in (direct.check, direct.update, direct.delete):
            assert "pxrs_entry.version = $" in statement.text
            assert "pxrs_entry.lease IS NULL" in statement.text
        assert "FOR SHARE" in direct.check.text
        assert "FOR KEY SHARE" in direct.lease.text
        assert "expires_ms >" in direct.lease.text
        for statement in (direct.lease, direct.check, direct.update, direct.delete):
            assert "1 / (SELECT count(*)" in statement.text, "it fails if it finds nothing"
        assert "ON CONFLICT" not in direct.insert.text, "it fails if the key is there"

    def test_a_commit_that_expects_all_its_keys_is_one_statement_a_key(self) -> None:
        def names(expect: dict[str, int], put: dict[str, bytes], delete: Iterable[str] = ()) -> list[str]:
            commit = Commit(expect, put, {}, frozenset(delete), None, False)
            return [call.statement.name for call in CommitPlan(commit, "n", statements_for("postgresql")).direct]

        assert names({"a": 3, "b": ABSENT, "c": 4, "d": 5}, {"a": b"", "b": b""}, ["c"]) == [
            "direct_update",
            "direct_insert",
            "direct_delete",
            "direct_check",
        ]
        assert names({"a": 3}, {"a": b"", "b": b""}) == [], "b is written whatever it is"
        assert names({"a": 3, "b": ABSENT}, {"a": b""}) == [], "b needs a row to lock"
        assert names({"a": 3}, {}) == [], "it writes nothing"
        assert names({"a": 2**63}, {"a": b""}) == [], "no key has such a version"

    def test_rows_are_locked_where_others_can_write_at_the_same_time(self) -> None:
        for dialect in ("oracle", "postgresql"):
            statements = statements_for(dialect)
            assert statements.lock_entry.text.endswith("FOR UPDATE")
            assert statements.lock_lease_to_end.text.endswith("FOR UPDATE")
        assert statements_for("postgresql").lock_lease.text.endswith("FOR KEY SHARE")
        assert statements_for("oracle").lock_lease.text.endswith("FOR UPDATE")
        assert "FOR" not in statements_for("sqlite").lock_entry.text

    def test_time_is_the_databases_own(self) -> None:
        for name in ("get", "scan", "renew_lease", "limit_lease", "lock_lease", "due_leases", "nearest_expiry"):
            assert " clock_timestamp()" in getattr(statements_for("postgresql"), name).text
            assert "SYSTIMESTAMP" in getattr(statements_for("oracle"), name).text
            assert ":now_ms" in getattr(statements_for("sqlite"), name).text

    @pytest.mark.parametrize("dialect", DIALECTS)
    def test_an_expiry_further_ahead_than_its_ttl_is_told_on_every_database(self, dialect: DialectName) -> None:
        statements = statements_for(dialect)
        for name in ("get", "scan", "lock_lease", "lock_lease_to_end", "lease_state", "due_leases", "limit_lease"):
            text = getattr(statements, name).text
            assert re.search(r"expires_ms > .* \+ pxrs_lease\.ttl_ms", text), text

    def test_a_limited_scan_says_so_in_each_language(self) -> None:
        assert statements_for("oracle").scan_some.text.endswith("FETCH FIRST :the_limit ROWS ONLY")
        for dialect in ("postgresql", "sqlite"):
            assert " LIMIT " in statements_for(dialect).scan_some.text

    def test_no_bind_name_is_a_reserved_word_of_oracle(self) -> None:
        for field in dataclasses.fields(Statements):
            statement = getattr(statements_for("oracle"), field.name)
            if isinstance(statement, Statement):
                assert '"' not in statement.text


class TestDdl:
    def test_keys_sort_by_byte_and_are_counted_in_bytes(self) -> None:
        assert 'key VARCHAR(512) COLLATE "C" NOT NULL' in ddl("postgresql")
        assert "key VARCHAR2(512 BYTE) NOT NULL" in ddl("oracle")
        assert "COLLATE" not in ddl("sqlite")

    @pytest.mark.parametrize("dialect", ["oracle", "postgresql"])
    def test_programs_get_no_more_than_they_need(self, dialect: str) -> None:
        grants = [line for line in ddl(dialect).splitlines() if line.startswith("GRANT")]
        assert len(grants) == 4
        assert not any("ALL" in grant or ("meta" in grant and "INSERT" in grant) for grant in grants)

    def test_an_unknown_dialect_is_refused_with_the_choices(self) -> None:
        with pytest.raises(ValueError, match="oracle, postgresql, sqlite"):
            ddl("mysql")


class TestRanges:
    KEYS = ("!", "a", "a!", "a-b", "a.b", "a/!", "a/b", "a/b/c", "a/~", "a0", "ab", "b", "~", "~~")

    @pytest.mark.parametrize("prefix", ["", "a/", "a/b/", "~/"])
    @pytest.mark.parametrize("after", [None, "", " ", "a", "a/", "a/b", "a\0zzz", "\0", "b", "\x7f", "zz"])
    def test_a_range_holds_exactly_the_keys_asked_for(self, prefix: str, after: str | None) -> None:
        bounds = key_range(prefix, after)
        expected = [key for key in self.KEYS if key.startswith(prefix) and (after is None or key > after)]
        assert [key for key in self.KEYS if bounds["lower"] < key < bounds["upper"]] == expected
        assert bounds["lower"], "Oracle takes an empty text for NULL"
        assert "\0" not in bounds["lower"], "PostgreSQL takes no NUL"


class TestPayloads:
    def test_a_few_keys_are_named(self) -> None:
        assert parse_payload(payload(["a/b", "c"], 1.5)) == (1.5, ["a/b", "c"])

    def test_many_keys_become_their_common_folder(self) -> None:
        keys = [f"groups/g/owners/{'x' * 50}/{i}" for i in range(100)]
        assert parse_payload(payload(keys)) == (0.0, [f"groups/g/owners/{'x' * 50}/"])
        assert parse_payload(payload([*keys, "else"])) == (0.0, [""])

    @pytest.mark.parametrize(
        ("keys", "folder"),
        [
            (["a/b", "a/c"], "a/"),
            (["a/b/c", "a/b"], "a/"),
            (["ab", "ac"], ""),
            (["a/b"], "a/"),
            (["a/bc", "a/bd"], "a/"),
        ],
    )
    def test_the_common_folder(self, keys: list[str], folder: str) -> None:
        assert common_folder(keys) == folder


class _Held:
    """Stands for a lease."""

    id = "mine"
    ttl = 3.0


def plan(dialect: DialectName = "postgresql", **arguments: Any) -> CommitPlan:
    defaults: dict[str, Any] = {"expect": {}, "put": {}, "ephemeral": {}, "delete": frozenset()}
    commit = Commit(**{**defaults, "lease": None, "quiet": False, **arguments})
    return CommitPlan(commit, "ns", statements_for(dialect), "channel")


def steps(calls: list[Call]) -> list[str]:
    return [f"{call.statement.name} {call.values.get('the_key', '')}".strip() for call in calls]


class TestCommitPlan:
    def test_r7_everything_is_locked_in_one_order_before_it_is_looked_at(self) -> None:
        commit = plan(expect={"d": ABSENT, "b": 7}, put={"c": b"", "b": b""}, delete=frozenset({"a"}), lease=_Held())
        assert steps(commit.locks) == [
            "lock_lease",
            "insert_placeholder a",
            "lock_entry a",
            "lock_entry b",
            "insert_placeholder c",
            "lock_entry c",
            "insert_placeholder d",
            "lock_entry d",
            "next_version",
        ]

    def test_placeholders_are_written_over_or_deleted(self) -> None:
        commit = plan(expect={"d": ABSENT}, put={"c": b"1"}, delete=frozenset({"a"}))
        found = commit.judge([[], [(0, None)], [], [(0, None)], [], [(0, None)], [(9,)]])
        commit.check_versions(found)
        assert steps(commit.writes(found)) == ["delete_entry a", "write_entry c", "delete_entry d", "notify"]
        assert commit.versions(found) == {"c": 9}

    def test_a_deletion_that_stands_alone_needs_no_placeholder(self) -> None:
        assert steps(plan(delete=frozenset({"a"})).locks) == ["lock_entry a"]

    def test_a_conflict_names_every_key_that_differs(self) -> None:
        commit = plan(expect={"d": ABSENT, "b": 7, "c": 3, "a": 1})
        found = commit.judge([[], [(8, None)], [(3, None)], [], [(4, None)]])
        with pytest.raises(Conflict) as conflict:
            commit.check_versions(found)
        assert conflict.value.keys == ("a", "b", "d")

    def test_a_commit_that_only_looks_writes_nothing(self) -> None:
        commit = plan(expect={"a": ABSENT, "b": 2})
        found = commit.judge([[], [(0, None)], [(2, None)]])
        assert commit.writes(found) == []

    def test_a_row_that_vanished_under_the_lock_is_tried_again(self) -> None:
        with pytest.raises(TransactionAborted):
            plan(put={"a": b""}).judge([[], [], [(1,)]])

    def test_r3_the_lease_is_judged_first(self) -> None:
        commit = plan(expect={"a": 1}, lease=_Held())
        with pytest.raises(LeaseExpired):
            commit.judge([[], [(2, None)]])
        with pytest.raises(LeasesDue) as due:
            commit.judge([[(1,)], [(2, None)]])
        assert due.value.leases == ["mine"]

    def test_leases_of_others_are_named_to_be_asked_for(self) -> None:
        commit = plan(expect={"a": 1, "b": 1, "c": 1}, lease=_Held())
        found = commit.judge([[(0,)], [(1, "other")], [(1, "mine")], [(1, None)]])
        assert found.foreign_leases == {"other"}

    def test_only_sqlite_counts_versions_itself_and_for_deletions_too(self) -> None:
        commit = plan("sqlite", delete=frozenset({"a"}))
        assert steps(commit.locks) == ["lock_entry a", "next_version"]
        assert steps(commit.writes(commit.judge([[(4, None)], [(5,)]]))) == ["delete_entry a", "store_version"]
        assert steps(plan(delete=frozenset({"a"})).locks) == ["lock_entry a"]

    def test_quiet_commits_and_deletions_of_nothing_tell_nobody(self) -> None:
        commit = plan(put={"a": b""}, quiet=True)
        assert steps(commit.writes(commit.judge([[], [(0, None)], [(1,)]]))) == ["write_entry a"]
        gone = plan(delete=frozenset({"a"}))
        assert gone.writes(gone.judge([[]])) == []

    def test_a_notification_says_how_soon_the_lease_may_expire(self) -> None:
        commit = plan(ephemeral={"m": b""}, lease=_Held())
        *_, notify = commit.writes(commit.judge([[(0,)], [], [(0, None)], [(1,)]]))
        assert notify.values["the_payload"] == "3000 m"


class TestPostgresErrors:
    @pytest.mark.parametrize(
        ("state", "kind"),
        [
            ("40P01", TransactionAborted),
            ("40001", TransactionAborted),
            ("55P03", RegistryUnavailable),
            ("57014", RegistryUnavailable),
            ("53300", RegistryUnavailable),
            ("57P01", ConnectionLost),
            ("25P03", ConnectionLost),
            ("", ConnectionLost),
            ("53100", StorageFull),
            ("42501", AccessDenied),
            ("25006", AccessDenied),
            ("28P01", AccessDenied),
            ("42P01", SchemaMissing),
            ("XX001", RegistryCorrupt),
            ("22000", RegistryError),
        ],
    )
    def test_each_state_has_its_meaning(self, state: str, kind: type[Exception]) -> None:
        database = PostgresDatabase(parse("postgresql://u:geheim@h/db"))
        error = database.translate(Reply(state=state, message="why"))
        assert type(error) is kind
        assert "geheim" not in str(error)


class TestAddresses:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("postgresql://h/db?color=red", "color.*sslmode"),
            ("postgresql://h/db?password=x", "password"),
            ("postgresql://h/db?watch=often", "listen, poll"),
            ("postgresql://h/db?timeout=soon", "timeout=10"),
            ("postgresql://h/db?create=maybe", "true or false"),
            ("postgresql:///db", "the host is empty"),
            ("postgresql://h/db?host=/tmp", "directory of a Unix socket"),
            ("postgresql://h/db?port=1", "before the path"),
            ("sqlite:file.db", "sqlite:///FILE"),
            ("sqlite://host/file.db", "sqlite:///FILE"),
            ("sqlite:///", "file is needed"),
            ("sqlite:///:memory:", "memory:"),
            ("sqlite:///f.db?sslmode=require", "sslmode"),
            ("oracle://u@h/XE", "service_name"),
            ("oracle://u@h/", "service_name"),
            ("oracle://u@a,b/?service_name=x", "one host"),
            ("oracle://u@h/?service_name=x&sid=y", "sid"),
        ],
    )
    def test_what_cannot_be_understood_is_refused_at_once(self, url: str, words: str) -> None:
        with pytest.raises(InvalidUrl, match=words):
            registries.open(url)


class _Polled:
    """Stands for a registry whose database says that nothing was written, whatever its keys say."""

    url = "test:"
    timeout = 5.0

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.database = self

    def gate(self) -> Gate:
        return _ShutGate()

    def sweep(self) -> None:
        return None

    def versions(self, prefixes: tuple[str, ...]) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class _ShutGate(Gate):
    def look(self) -> tuple[bool, bool]:
        return False, False

    def close(self) -> None:
        pass


class TestPoller:
    A, B = [[("k", 1)]], [[("k", 2)]]

    @pytest.mark.parametrize("answers", [(A, B), (A, RegistryUnavailable("down"), B)], ids=["at once", "after a fault"])
    def test_r2_a_change_between_the_first_look_and_the_first_round_is_not_missed(self, answers: Any) -> None:
        poller = Poller(_Polled(*answers), 0.001)  # type: ignore[arg-type]
        watches = SharedWatches()
        watch = Watch(("k",), watches.remove)
        watches.add(watch)
        try:
            watches.arm(watch, poller.add, poller.remove)
            assert watch.wait(30)
            assert not watch.wait(0.02), "and then there is nothing new"
        finally:
            poller.close()


class _Cursor:
    """Stands for Oracle: answers from a script, and notes what it was asked."""

    rowcount = 1

    def __init__(self, script: Iterator[Any], asked: list[str]) -> None:
        self._script, self._asked = script, asked

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def setinputsizes(self, **sizes: object) -> None:
        assert sizes == {"the_value": oracledb.DB_TYPE_LONG_RAW}

    def execute(self, text: str, values: dict[str, Any]) -> None:
        self._asked.append(text.split()[0])
        answer = next(self._script)
        if isinstance(answer, Exception):
            raise answer
        self._rows: list[Row] = answer

    def fetchall(self) -> list[Row]:
        return self._rows


class _Oracle:
    call_timeout = 0

    def __init__(self, *script: Any, commit: Exception | None = None) -> None:
        self.asked: list[str] = []
        self._script, self._commit = iter(script), commit

    def cursor(self) -> _Cursor:
        return _Cursor(self._script, self.asked)

    def commit(self) -> None:
        self.asked.append("COMMIT")
        if self._commit is not None:
            raise self._commit

    def rollback(self) -> None:
        self.asked.append("ROLLBACK")


class _Detail:
    def __init__(self, code: int, full_code: str = "") -> None:
        self.code, self.full_code, self.isrecoverable = code, full_code or f"ORA-{code:05}", False


def oracle_error(code: int, full_code: str = "") -> oracledb.DatabaseError:
    return oracledb.DatabaseError(_Detail(code, full_code))


class TestOracleSession:
    ADDRESS = parse("oracle://u:geheim@h/?service_name=x")
    PLACE: Call = Call(statements_for("oracle").insert_placeholder, {"the_namespace": "n", "the_key": "k"})
    LOCK: Call = Call(statements_for("oracle").lock_entry, {"the_namespace": "n", "the_key": "k"})

    def session(self, connection: _Oracle) -> OracleSession:
        return OracleSession(OracleDatabase(self.ADDRESS), connection, float("1e9"))  # type: ignore[arg-type]

    def test_a_duplicate_placeholder_is_a_row_that_is_there(self) -> None:
        session = self.session(_Oracle(oracle_error(1), [(3, None)]))
        assert session.begin([self.PLACE, self.LOCK]) == [[], [(3, None)]]

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (oracle_error(60), TransactionAborted),
            (oracle_error(1017), AccessDenied),
            (oracle_error(942), SchemaMissing),
            (oracle_error(1653), StorageFull),
            (oracle_error(1013), RegistryUnavailable),
            (oracle_error(3113), ConnectionLost),
            (oracle_error(0, "DPY-4011"), ConnectionLost),
            (oracle_error(904), RegistryError),
        ],
    )
    def test_each_code_has_its_meaning(self, error: oracledb.DatabaseError, kind: type[Exception]) -> None:
        session = self.session(_Oracle(error))
        with pytest.raises(kind) as raised:
            session.begin([self.LOCK])
        assert type(raised.value) is kind
        assert session.is_idle is False

    @pytest.mark.parametrize("error", [oracle_error(3113), oracle_error(0, "DPY-4024"), oracle_error(1013)])
    def test_r5_a_commit_without_an_answer_is_unknown(self, error: oracledb.DatabaseError) -> None:
        session = self.session(_Oracle([(3, None)], commit=error))
        session.begin([self.LOCK])
        with pytest.raises(OutcomeUnknown):
            session.commit(())
        assert not session.is_idle

    def test_a_value_is_bound_as_a_long_one(self) -> None:
        values = {"the_namespace": "n", "the_key": "k", "the_version": 1, "the_lease": None}
        connection = _Oracle([])
        self.session(connection).commit([Call(statements_for("oracle").write_entry, {**values, "the_value": b"x"})])
        assert connection.asked == ["UPDATE", "COMMIT"]
