"""S1: what a user writes into `.option(...)`, and what is said about mistakes."""

import itertools
from pathlib import Path

import pytest

from pxrs.errors import InvalidOption
from pxrs.publishing.selection import Boundary, Topics
from pxrs.spark.options import columns_of, read_options, stream_options, write_options

WHERE = {"url": "data", "topic": "orders"}
STREAM = {**WHERE, "group": "g"}


def test_a_relative_path_becomes_that_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_options(WHERE).where.url == str(tmp_path / "data")
    for given, resolved in [
        ("reg", f"{tmp_path}/reg"),
        ("file:reg?namespace=prod", f"{tmp_path}/reg?namespace=prod"),
        ("sqlite:///r.db", f"sqlite:///{tmp_path}/r.db"),
        ("sqlite:///in/r.db?namespace=prod&timeout=3", f"sqlite:///{tmp_path}/in/r.db?namespace=prod&timeout=3"),
        ("sqlite:////var/r.db", "sqlite:////var/r.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("etcd://host:2379?namespace=prod", "etcd://host:2379?namespace=prod"),
    ]:
        assert write_options({**WHERE, "registry": given}).registry == resolved


def test_names_in_any_case_as_spark_hands_them_over() -> None:
    options = stream_options({**STREAM, "maxoffsetspertrigger": "7", "failondataloss": "FALSE", "SHAREGROUP": "true"})
    assert (options.rows_max, options.fails_on_loss, options.is_shared) == (7, False, True)


def test_f7_a_query_names_the_assignor_of_its_group() -> None:
    assert stream_options(STREAM).assignor == "sticky"
    assert stream_options({**STREAM, "assignor": " range"}).assignor == "range"
    with pytest.raises(InvalidOption, match=r"option assignor: .*choose from sticky, range, round-robin"):
        stream_options({**STREAM, "assignor": "best"})


def test_what_spark_adds_by_itself_is_no_mistake() -> None:
    assert write_options({**WHERE, "checkpointlocation": "c", "queryname": "q"}).topic == "orders"


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        ({"topic": "orders"}, Topics(("orders",))),
        ({"subscribe": " orders"}, Topics(("orders",))),
        ({"subscribe": "orders, returns"}, Topics(("orders", "returns"))),
        ({"topic": "orders,returns"}, Topics(("orders", "returns"))),
        ({"subscribePattern": "ord.*"}, Topics(pattern="ord.*")),
        ({"assign": '{"orders": [2, 0], "returns": [1]}'}, Topics(assigned={"orders": (0, 2), "returns": (1,)})),
    ],
)
def test_topics_by_name_pattern_or_partition(given: dict[str, str], topics: Topics) -> None:
    assert read_options({"url": "data", **given}).where.topics == topics
    assert stream_options({"url": "data", "group": "g", **given}).where.topics == topics
    kafkas = ("key", "value", "topic", "partition", "offset", "timestamp")
    if topics.only is None:
        assert read_options({"url": "data", **given}).columns == columns_of(given) == kafkas


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ('{"0": 23, "1": -2}', {"orders": {0: 23, 1: -2}}),
        ('{"orders": {"0": 23, "1": -1}}', {"orders": {0: 23, 1: -1}}),
        ('{"orders": {"0": 23}, "returns": {"0": -2}}', {"orders": {0: 23}, "returns": {0: -2}}),
    ],
)
def test_offsets_by_partition_and_topic(text: str, offsets: dict[str, dict[int, int]]) -> None:
    given = {**STREAM, "startingOffsets": text}
    assert stream_options(given).starting == Boundary("startingOffsets", "earliest", offsets)
    assert read_options({**WHERE, "endingOffsets": text}).ending == Boundary("endingOffsets", "latest", offsets)


def test_offsets_as_words() -> None:
    assert stream_options({**STREAM, "startingOffsets": "latest"}).starting == Boundary("startingOffsets", "latest")
    assert stream_options(STREAM).starting == Boundary("startingOffsets", "earliest")
    assert read_options(WHERE).ending == Boundary("endingOffsets", "latest")


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [("1700000000000", 1_700_000_000_000_000), ("2023-11-14T22:13:20+00:00", 1_700_000_000_000_000)],
)
def test_a_time_in_milliseconds_or_as_text(text: str, microseconds: int) -> None:
    boundary = read_options({**WHERE, "startingTimestamp": text}).starting
    assert boundary == Boundary("startingTimestamp", "earliest", time_us=microseconds)


def test_times_by_partition_as_kafkas_and_what_counts_without_a_match() -> None:
    text = '{"orders": {"0": 1700000000000, "1": 5}}'
    times = {"orders": {0: 1_700_000_000_000_000, 1: 5_000}}
    options = read_options({**WHERE, "startingOffsetsByTimestamp": text, "endingOffsetsByTimestamp": text})
    assert options.starting == Boundary("startingOffsetsByTimestamp", "earliest", times_us=times)
    assert options.ending == Boundary("endingOffsetsByTimestamp", "latest", times_us=times)
    for strategy, must_match in (("error", True), ("latest", False)):
        for more in ({"startingOffsetsByTimestamp": text}, {"startingTimestamp": "5"}):
            given = {**STREAM, **more, "startingOffsetsByTimestampStrategy": strategy}
            assert stream_options(given).starting.must_match == must_match


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10), ("2m", 120), ("3min", 180), ("1h", 3600), ("500ms", 0.5), ("250", 0.25)]
)
def test_at_least_so_many_rows_and_a_delay_as_spark_writes_it(text: str, seconds: float) -> None:
    options = stream_options({**STREAM, "minOffsetsPerTrigger": "100", "maxTriggerDelay": text})
    assert (options.rows_min, options.trigger_delay_s) == (100, seconds)
    assert stream_options({**STREAM, "minOffsetsPerTrigger": "100"}).trigger_delay_s == 900


@pytest.mark.parametrize(
    ("more", "columns"),
    [
        ({}, ("key", "value", "partition", "offset", "timestamp")),
        ({"includeTopic": "true"}, ("key", "value", "topic", "partition", "offset", "timestamp")),
        ({"columns": "topic,value"}, ("topic", "value")),
        ({"columns": "value", "includeTopic": "true"}, ("value",)),
        ({"includeHeaders": "true"}, ("key", "value", "partition", "offset", "timestamp", "headers")),
        ({"columns": "value, key"}, ("value", "key")),
        ({"COLUMNS": "offset"}, ("offset",)),
        ({"columns": "key,headers", "includeHeaders": "true"}, ("key", "headers")),
        ({"columns": "key", "includeHeaders": "true"}, ("key",)),
    ],
)
def test_columns_are_those_that_are_asked_for_in_their_order(more: dict[str, str], columns: tuple[str, ...]) -> None:
    assert read_options({**WHERE, **more}).columns == columns
    assert stream_options({**STREAM, **more}).columns == columns
    assert columns_of({**WHERE, **more}) == columns


@pytest.mark.parametrize(
    ("changes", "option", "says"),
    [
        ({"url": None}, "url", "missing"),
        ({"topic": None}, "topic", "missing"),
        ({"subscribe": "orders"}, "subscribe", "an alias"),
        ({"topic": "a,"}, "topic", "an empty name between two commas"),
        ({"topic": "a,b,a"}, "topic", "a is given twice"),
        ({"subscribePattern": "a"}, "subscribePattern", "topic and subscribePattern all name the topics"),
        ({"topic": None, "subscribePattern": "("}, "subscribePattern", "not a regular expression"),
        ({"assign": '{"a": [0]}'}, "assign", "give one of them"),
        ({"topic": None, "assign": "a"}, "assign", "JSON such as"),
        ({"topic": None, "assign": "{}"}, "assign", "JSON such as"),
        ({"topic": None, "assign": '{"a": []}'}, "assign", "JSON such as"),
        ({"topic": None, "assign": '{"a": [-1]}'}, "assign", "JSON such as"),
        ({"topic": None, "assign": '{"a": ["0"]}'}, "assign", "JSON such as"),
        ({"topic": None, "assign": '{"a": [1, 1]}'}, "assign", "twice"),
        ({"topic": None, "assign": '{"a": [0], "a": [1]}'}, "assign", '"a" is given twice'),
        ({"group": None}, "group", "name the group"),
        ({"xyz": "3"}, "xyz", "unknown; spark.readStream has url"),
        ({"startingofsets": "3"}, "startingofsets", r"unknown; did you mean startingOffsets\? spark.readStream has"),
        ({"offsetsByTimestamp": "3"}, "offsetsByTimestamp", "did you mean startingOffsetsByTimestamp"),
        ({"starting_offsets_by_timestamp": "3"}, "starting_offsets_by_timestamp", "mean startingOffsetsByTimestamp"),
        ({"kafka.bootstrap.servers": "h:1"}, "kafka.bootstrap.servers", "Kafka source: .*directory or server as url"),
        ({"kafka.group.id": "g"}, "kafka.group.id", "as group"),
        ({"groupidprefix": "g"}, "groupidprefix", "as group"),
        ({"kafka.security.protocol": "SSL"}, "kafka.security.protocol", "remove it"),
        ({"maxRecordsPerPartition": "1"}, "maxRecordsPerPartition", "minPartitions"),
        ({"endingOffsets": "latest"}, "endingOffsets", "not an option of spark.readStream"),
        ({"startingOffsets": "first"}, "startingOffsets", "earliest, latest, committed"),
        ({"startingOffsets": '{"0": "x"}'}, "startingOffsets", "JSON such as"),
        ({"startingOffsets": '{"0": -3}'}, "startingOffsets", "JSON such as"),
        ({"startingOffsets": "{0: 1}"}, "startingOffsets", "JSON such as"),
        ({"startingOffsets": '{"0": 1, "0": 2}'}, "startingOffsets", '"0" is given twice'),
        ({"startingOffsets": '{"0": 1, "00": 2}'}, "startingOffsets", "JSON such as"),
        (
            {"startingOffsets": "earliest", "startingTimestamp": "1"},
            "startingTimestamp",
            "startingOffsets is given as well",
        ),
        (
            {"startingOffsetsByTimestamp": '{"orders": {"0": 1}}', "startingTimestamp": "1"},
            "startingTimestamp",
            "startingOffsetsByTimestamp is given as well",
        ),
        ({"startingOffsetsByTimestamp": "5"}, "startingOffsetsByTimestamp", "JSON such as"),
        ({"startingOffsetsByTimestamp": '{"0": 1.5}'}, "startingOffsetsByTimestamp", "milliseconds"),
        ({"startingOffsetsByTimestampStrategy": "error"}, "startingOffsetsByTimestampStrategy", "effect only with"),
        (
            {"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "x"},
            "startingOffsetsByTimestampStrategy",
            "latest or error",
        ),
        ({"topic": "a,b", "startingOffsets": '{"0": 1}'}, "startingOffsets", "for several topics"),
        ({"startingOffsets": '{"orders": {"x": 1}}'}, "startingOffsets", "JSON such as"),
        ({"startingOffsets": "[1]"}, "startingOffsets", "JSON such as"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "minOffsetsPerTrigger", "5 is more than"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, "maxTriggerDelay", "500ms, 10s, 15m"),
        ({"minOffsetsPerTrigger": "5", "maxTriggerDelay": "0s"}, "maxTriggerDelay", "500ms, 10s, 15m"),
        ({"maxTriggerDelay": "1m"}, "maxTriggerDelay", "only with minOffsetsPerTrigger"),
        ({"includeTopic": "yes"}, "includeTopic", "true or false"),
        ({"startingTimestamp": "2026-01-01T00:00:00"}, "startingTimestamp", "time zone"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp", "milliseconds"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger", "of at least 1"),
        ({"maxOffsetsPerTrigger": "1", "maxRowsPerTrigger": "1"}, "maxRowsPerTrigger", "an alias"),
        ({"minPartitions": "x"}, "minPartitions", "whole number"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss", "true or false"),
        ({"leaseTtl": "-1"}, "leaseTtl", "seconds"),
        ({"group": " "}, "group", "empty"),
        ({"url": "memory:"}, "url", "directory"),
        ({"url": "postgresql://h/d"}, "url", "directory"),
        ({"registry": "memory:"}, "registry", "in memory"),
        ({"url": "host:2181"}, "url", "looks like a host"),
        ({"url": "file://host/data"}, "url", "file: takes no host, but got 'host'"),
        ({"registry": "etcd://host?namespace=*"}, "registry", "letters, digits"),
        ({"registry": "file://host/data"}, "registry", "file: takes no host, but got 'host'"),
        ({"path": "/nowhere"}, "path", "remove it from load, save or start"),
        (
            {"columns": "key,vlaue"},
            "columns",
            "'vlaue' is not a column; give some of key, value, topic, partition, offset, timestamp,",
        ),
        ({"columns": "Key"}, "columns", "'Key' is not a column; give some of key"),
        ({"columns": "key,value, key"}, "columns", "'key' is given twice; give some of key"),
        ({"columns": ""}, "columns", "'' is not a column; give some of key"),
        ({"columns": "key,"}, "columns", "'' is not a column; give some of key"),
        ({"columns": "headers"}, "columns", "headers needs includeHeaders=true; otherwise give some of key"),
        ({"columns": "x", "includeHeaders": "true"}, "columns", "timestamp, headers, with commas"),
    ],
)
def test_a_wrong_option_is_named_with_its_choices(changes: dict[str, str | None], option: str, says: str) -> None:
    given = {name: value for name, value in {**STREAM, **changes}.items() if value is not None}
    with pytest.raises(InvalidOption, match=says) as caught:
        stream_options(given)
    assert caught.value.option == option


def test_an_option_to_push_filters_is_refused_with_the_options_that_bound_a_read() -> None:
    for name, options in itertools.product(("pushFilters", "pushfilters"), (read_options, stream_options)):
        with pytest.raises(
            InvalidOption, match=r"assign .*startingOffsets.*endingOffsets.*startingTimestamp"
        ) as caught:
            options({**STREAM, name: "true"})
        assert caught.value.option == "pushFilters"


@pytest.mark.parametrize(
    ("more", "option"),
    [
        ({"startingOffsets": "latest"}, "startingOffsets"),
        ({"startingOffsets": "committed"}, "group"),
        ({"group": "g"}, "group"),
        ({"maxOffsetsPerTrigger": "1"}, "maxOffsetsPerTrigger"),
    ],
)
def test_what_makes_no_sense_for_a_batch(more: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        read_options({**WHERE, **more})
    assert caught.value.option == option


def test_a_password_in_the_registrys_address_is_not_shown() -> None:
    options = stream_options({**STREAM, "registry": "postgresql+psycopg://me:secret@h/d"})
    assert "secret" not in repr(options)


def test_x21_the_address_of_a_table_is_for_batches_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = "postgresql+psycopg://me:secret@h/d?sslmode=require"
    options = read_options({**WHERE, "sourceurl": address})
    assert options.source_url == address
    assert "secret" not in repr(options)
    for options_of, given in ((stream_options, STREAM), (write_options, WHERE)):
        with pytest.raises(InvalidOption, match="option sourceUrl") as caught:
            options_of({**given, "sourceUrl": address})
        assert "secret" not in str(caught.value)
    monkeypatch.chdir(tmp_path)
    for url, resolved in [
        ("sqlite:///shop.db?timeout=3", f"sqlite:///{tmp_path}/shop.db?timeout=3"),
        ("sqlite+pysqlite:////var/shop.db", "sqlite+pysqlite:////var/shop.db"),
        ("oracle://me@h/d", "oracle://me@h/d"),
    ]:
        assert read_options({**WHERE, "sourceUrl": url}).source_url == resolved


def test_a_path_beside_the_url_is_no_place(tmp_path: Path) -> None:
    for options_of in (read_options, write_options, columns_of):
        with pytest.raises(InvalidOption) as caught:
            options_of({**WHERE, "path": str(tmp_path)})
        assert caught.value.option == "path"


def test_the_address_of_a_server_keeps_its_options_with_the_drivers_paths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"url": "pxrs://one:1,two:2?patience=30&token_file=token", "topic": "t"}
    for where in (read_options(given).where, stream_options({**given, "group": "g"}).where, write_options(given)):
        assert where.url == f"pxrs://one:1,two:2?patience=30&token_file={tmp_path}/token"
        assert where.registry is None
    with pytest.raises(InvalidOption, match=r"registry.*a server with its own registry: remove this option"):
        read_options({**given, "registry": "etcd://host"})
    with pytest.raises(InvalidOption, match=r"behind a server, pxrs://HOST:PORT; memory: is neither"):
        write_options({"url": "memory:", "topic": "t"})
