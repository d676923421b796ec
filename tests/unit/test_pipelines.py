"""What can be known of a pipeline without Spark: its definition, its file, its errors and its lines."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import pxrs
from pxrs.cli.app import app
from pxrs.cli.pipeline.file import load
from pxrs.cli.pipeline.history import run_history
from pxrs.cli.pipeline.progress import Lines
from pxrs.cli.pipeline.signals import Signals
from pxrs.errors import InvalidPipeline, MissingDependency, PipelineFailed
from pxrs.group.records import Checkpoint
from pxrs.spark import Pipeline, Topics, parquet, parse_json, pipeline, to, topics_matching
from pxrs.spark.pipeline import check_together
from pxrs.spark.progress import BatchReport, TopicProgress, short_reason
from pxrs.spark.run import QueryRun, Run, check_topics, missing_topics
from pxrs.spark.sinks import HubAddress, Sink

JSON = parse_json("a INT")


def make(source: str | list[str] | Topics = "orders", sink: str | Sink = "totals", **more: Any) -> Pipeline:
    def totals(rows: Any) -> Any:
        return rows

    return pipeline(source, sink, **more)(totals)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading a file changes where Python looks for modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    yield
    sys.modules.pop("pxrs_pipeline_file", None)


def test_importing_the_command_line_and_the_decorator_needs_no_pyspark() -> None:
    code = "import sys, pxrs.cli.app, pxrs.spark, pxrs.spark.run; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_name_and_group_are_those_of_the_function() -> None:
    made = make()
    assert (made.name, made.group, made.sink.topic) == ("totals", "totals", "totals")
    assert made("rows") == "rows", "called, it is the function"  # type: ignore[arg-type]
    other = make(name="t-2", group="g", parse=JSON, dead_letters="bad")
    assert (other.name, other.groups()) == ("t-2", ["g", "g.dead-letters"])
    assert other.topics() == ["orders", "totals", "bad"]
    assert make(sink=parquet("out", partition_by="day")).sink == Sink("parquet", {"path": "out"}, ("day",))
    assert make(sink=to("csv", ("a", "b"), path="out", header=True)).sink.options == {"path": "out", "header": True}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": "a/b"}, "give name="),
        ({"group": "a b"}, "'a b' is no name of a group"),
        ({"sink": 7}, "sink is 7"),
        ({"output_mode": "upsert"}, "choose from append, update, complete"),
        ({"sink": parquet("out"), "output_mode": "update"}, "Parquet files are appended to"),
        ({"output_mode": "complete"}, "a topic is appended to"),
        ({"dead_letters": "bad", "parse": parse_json("a INT", on_bad="drop")}, "contradict"),
        ({"sink": "orders"}, "sink is the source"),
        ({"dead_letters": "orders", "parse": JSON}, "dead_letters is the source"),
        ({"source": ["orders", "returns"], "sink": "returns"}, "sink is the source, returns"),
        ({"source": topics_matching("t.*")}, "sink is the source, totals"),
        ({"source": topics_matching(" orders|totals ")}, "sink is the source, totals"),
        ({"options": {"subscribePattern": "x"}}, "options: subscribePattern cannot"),
        ({"options": {"Topic": "x", "maxRowsPerTrigger": 1}}, "options: Topic cannot"),
        ({"options": {"minPartitions": 1, "MINpartitions": 2}}, "minPartitions and MINpartitions are one option"),
        ({"options": {"Columns": "value"}, "parse": JSON}, "columns is for functions without a parse step"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPipeline, match=words):
        make(**more)


def test_a_sink_that_is_a_topic_is_given_by_its_name_and_on_bad_by_its_words() -> None:
    with pytest.raises(InvalidPipeline, match="by its name"):
        to("pxrs", topic="t")
    with pytest.raises(InvalidPipeline, match="given by its name"):
        to("PXRS", topic="t")
    with pytest.raises(InvalidPipeline, match="choose fail or drop"):
        parse_json("a INT", on_bad="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidPipeline, match="before a function"):
        pipeline("a", "b")(make())


def test_a_batch_of_history_has_the_columns_that_the_stream_has() -> None:
    spark = Mock()
    for made in (spark.read.format, spark.read.options):
        made.return_value = spark.read
    options = {"columns": "key,value", "includeHeaders": "true", "maxRowsPerTrigger": 9}
    make(options=options).messages(spark, HubAddress("hub"), endingTimestamp="7")
    given = {name: value for call in spark.read.options.call_args_list for name, value in call.kwargs.items()}
    expected = {"columns": "key,value", "includeHeaders": "true", "endingTimestamp": "7"}
    assert given == {**expected, "url": "hub", "topic": "orders"}


def test_two_of_one_name_or_one_group_are_refused() -> None:
    check_together([make(), make(name="other")])
    with pytest.raises(InvalidPipeline, match="two pipelines are named totals"):
        check_together([make(), make(group="other")])
    both = [make(parse=JSON, dead_letters="bad"), make(name="other", group="totals.dead-letters")]
    with pytest.raises(InvalidPipeline, match=r"totals and other are both in the group totals\.dead-letters"):
        check_together(both)


@pytest.mark.parametrize("other", ["out", "./out/", "{here}/out", "file://{here}/out", "link"])
def test_two_that_write_files_into_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Spark would take the batches of the one for those of the other, and leave them out."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("out")
    both = [make(sink=parquet("out")), make(name="b", sink=to("JSON", Path=other.format(here=tmp_path)))]
    with pytest.raises(InvalidPipeline, match=r"totals and b both write files into .*out"):
        check_together(both)


def test_several_may_write_elsewhere_or_into_one_table() -> None:
    check_together([make(sink=parquet("out")), make(name="b", sink=parquet("out2"))])
    check_together([make(sink=to("console")), make(name="b", sink=to("console"))])
    check_together([make(sink=parquet("s3a://b/out")), make(name="b", sink=parquet("s3a://c/out"))])
    check_together([make(sink=to("delta", path="t")), make(name="b", sink=to("delta", path="t"))])


@pytest.mark.parametrize(
    ("written", "planned", "is_refused"),
    [
        (None, None, False),  # no stream has written there
        (-1, None, False),  # one was started, and ended before its first batch
        (0, None, True),  # the checkpoint location was lost
        (5, [3, 4], True),  # or an old one restored
        (5, [4, 5, 6], False),
        (10, [9, 10], False),
    ],
)
def test_files_of_a_stream_that_the_checkpoint_location_does_not_know_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None, planned: list[int] | None, is_refused: bool
) -> None:
    monkeypatch.setattr("pxrs.spark.run.last_written", lambda spark, folder: written, raising=False)
    for number in planned or ():
        (tmp_path / "totals" / "offsets").mkdir(parents=True, exist_ok=True)
        (tmp_path / "totals" / "offsets" / str(number)).touch()
        (tmp_path / "totals" / "offsets" / f".{number + 7}.crc").touch()
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders")
        try:
            Run(None, hub, [make(sink=parquet("out"))], HubAddress("memory:"), tmp_path)  # type: ignore[arg-type]
        except InvalidPipeline as error:
            found = str(error)
    assert ("another path" in found and "out/_spark_metadata" in found) == is_refused, found


def test_history_is_not_written_where_a_stream_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pxrs.cli.pipeline.history.last_written", lambda spark, folder: -1, raising=False)
    with pytest.raises(InvalidPipeline, match="totals: a stream writes into out"):
        run_history(None, [make(sink=parquet("out"))], HubAddress("hub"), {}, 20, True, False)  # type: ignore[arg-type]


def test_rows_and_dead_letters_begin_at_the_same_messages(tmp_path: Path) -> None:
    made = make(parse=JSON, dead_letters="bad", options={"StartingOffsets": "latest"})
    with pxrs.open(tmp_path / "hub") as hub:
        for topic in made.topics():
            hub.create_topic(topic, partitions=2)

        def started() -> list[list[int | None]]:
            run = Run(None, hub, [], HubAddress(hub.url), tmp_path)  # type: ignore[arg-type]
            run._pipelines = [made]
            run.start()
            with hub.producer("orders") as out:
                out.send(b"1", partition=0)
            return [[each.checkpoint for each in hub.group(group).describe().partitions] for group in made.groups()]

        with hub.producer("orders") as out:
            out.send(b"0", partition=0)
        assert started() == [[1, 0], [1, 0]]
        assert started() == [[1, 0], [1, 0]], "only once"
        hub.group("totals.dead-letters").delete()
        assert started() == [[1, 0], [1, 0]], "dead letters that are added later begin where the rows are"
        hub.group("totals").delete()
        hub.group("totals.dead-letters").delete()
        assert started() == [[4, 0], [4, 0]]


def test_rows_and_dead_letters_of_several_topics_begin_at_the_same_messages(tmp_path: Path) -> None:
    starts = json.dumps({"orders": {"0": 1, "1": -1}, "returns": {"0": -2, "1": -1}})
    made = make(["orders", "returns"], parse=JSON, dead_letters="bad", options={"startingOffsets": starts})
    with pxrs.open(tmp_path / "hub") as hub:
        for topic in made.topics():
            hub.create_topic(topic, partitions=2)
        for topic in ("orders", "returns"):
            with hub.producer(topic) as out:
                for partition in (0, 0, 1):
                    out.send(b"x", partition=partition)
        run = Run(None, hub, [], HubAddress(hub.url), tmp_path)  # type: ignore[arg-type]
        run._pipelines = [made]
        run.start()
        ids = {hub.topic(topic).id: topic for topic in ("orders", "returns")}
        for group in made.groups():
            prefix = f"groups/{group}/checkpoints/"
            found = {
                (ids[name.split("/")[0]], int(name.split("/")[1])): Checkpoint.load(entry.key, entry.value).offset
                for entry in hub.registry.scan(prefix)
                for name in [entry.key.removeprefix(prefix)]
            }
            assert found == {("orders", 0): 1, ("orders", 1): 1, ("returns", 0): 0, ("returns", 1): 1}


def test_several_topics_are_options_of_the_reader_and_names_for_people() -> None:
    given = make(["orders", "returns"], options={"maxRowsPerTrigger": 9})
    assert HubAddress("hub").options(given.source) == {"url": "hub", "subscribe": "orders,returns"}
    assert given.options == {"includeTopic": "true", "maxRowsPerTrigger": 9}
    assert (str(given.source), given.topics()) == ("orders, returns", ["orders", "returns", "totals"])
    assert make(["orders"]).options == {"includeTopic": "true"}, "also if the list has one name now"
    assert make().options == {}
    like = make(topics_matching("orders-.*"))
    assert HubAddress("hub").options(like.source) == {"url": "hub", "subscribePattern": "orders-.*"}
    assert (str(like.source), like.topics()) == ("topics that match orders-.*", ["totals"])
    for pattern, words in ((7, "pattern is 7"), ("", "pattern is ''"), ("(", "is no regular expression")):
        with pytest.raises(InvalidPipeline, match=words):
            topics_matching(pattern)  # type: ignore[arg-type]


def test_topics_that_are_missing_are_named_with_what_makes_them() -> None:
    pipelines = [make(parse=JSON, dead_letters="bad"), make(name="b", sink=parquet("out"))]
    with pxrs.open("memory:") as hub:
        hub.create_topic("orders")
        assert missing_topics(hub, pipelines) == ["totals", "bad"]
        with pytest.raises(InvalidPipeline, match="pxrs topic create totals --at memory:; pxrs topic create bad"):
            check_topics(hub, pipelines)
        hub.create_topic("totals")
        hub.create_topic("bad")
        check_topics(hub, pipelines)
        assert missing_topics(hub, [make(["orders", "returns"]), make(topics_matching("o.*"))]) == ["returns"]
        check_topics(hub, [make(topics_matching("o.*"))])
        with pytest.raises(InvalidPipeline, match=r"totals: source: no topic of the hub matches x\.\*: create one"):
            check_topics(hub, [make(topics_matching("x.*"))])


# The file.

HEAD = "from pxrs.spark import pipeline\n"
ONE = "@pipeline(source='a', sink='b')\ndef one(rows):\n    return rows\n"


def test_a_file_gives_the_pipelines_that_it_defines_itself(tmp_path: Path) -> None:
    (tmp_path / "elsewhere_pipelines.py").write_text(HEAD + ONE.replace("one", "imported"))
    file = tmp_path / "file.py"
    file.write_text(HEAD + "import elsewhere_pipelines\n" + ONE + ONE.replace("one", "two"))
    assert [each.name for each in load(file)] == ["one", "two"]
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path), "the workers find it too"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "defines no pipeline"),
        (HEAD + ONE + ONE, "two pipelines are named one"),
        (HEAD + "@pipeline(source='a', sink='a')\ndef one(rows): ...\n", r"feed itself for ever \(.*file.py, line 2\)"),
        ("x = 1\n1 / 0\n", r"ZeroDivisionError: division by zero \(.*file.py, line 2\)"),
        ("def one(:\n", r"SyntaxError: .*file.py, line 1\)"),
        ("raise SystemExit(7)\n", "SystemExit: 7"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "file.py").write_text(text)
    with pytest.raises(InvalidPipeline, match=words) as raised:
        load(tmp_path / "file.py")
    assert "\n" not in str(raised.value)


def test_without_pyspark_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pxrs\[spark\]"):
        load(tmp_path / "file.py")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--write"], 2, "go with --history"),
        (["--history", "--once"], 2, "ends by itself"),
        (["--registry", "memory:"], 2, "Spark has several"),
        (["--conf", "x"], 2, "write KEY=VALUE"),
        (["--at", "nowhere"], 2, "there is no directory nowhere"),
        (["--at", "memory:"], 2, "share a hub in a directory"),
        (["--at", "pxrs://127.0.0.1:1"], 2, "--checkpoints DIR"),
        (["nope"], 2, "no pipeline nope; there are one"),
        ([], 2, "pxrs topic create b --at"),
    ],
)
def test_what_is_wrong_is_told_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.py").write_text(HEAD + ONE)
    with pxrs.open("hub") as hub:
        hub.create_topic("a")
        if "--conf" in arguments:
            hub.create_topic("b")
    at = [] if "--at" in arguments else ["--at", "hub"]
    result = CliRunner().invoke(app, ["pipeline", "run", "file.py", *at, *arguments])
    told = " ".join((result.output + str(result.exception)).replace("│", " ").split())
    assert result.exit_code == code, told
    assert words in told


def test_a_topic_that_another_process_creates_meanwhile_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.py").write_text(HEAD + ONE)

    def overtaken(hub: pxrs.Hub, pipelines: Sequence[Pipeline]) -> list[str]:
        missing = missing_topics(hub, pipelines)
        if len(missing) == 2:  # the first call; the next one checks what is there
            with pxrs.open("hub") as other:
                other.create_topic(missing[0], partitions=3)
        return missing

    def not_started(*arguments: object) -> NoReturn:
        raise PipelineFailed("Spark was to start now")

    monkeypatch.setattr("pxrs.spark.run.missing_topics", overtaken)
    monkeypatch.setattr("pxrs.cli.pipeline.running.spark_session", not_started)
    result = CliRunner().invoke(app, ["pipeline", "run", "file.py", "--at", "hub", "--create-topics"])
    assert "Spark was to start now" in result.output + str(result.exception)
    with pxrs.open("hub") as hub:
        assert {topic.name: topic.partitions for topic in hub.topics()} == {"a": 3, "b": 8}


# Errors and lines.

FAILED = "[STREAM_FAILED] Query [id = 7b62, runId = 302e] terminated with exception: "
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 11, in boom\n    boom()\n    ^^^^\n'
RAISED = FAILED + "[USER_RAISED_EXCEPTION] t/0 offset 3: a is missing SQLSTATE: P0001 SQLSTATE: XXKST\n=== Streaming\n"
WORKER = FAILED + f"[PYTHON_EXCEPTION] From the worker: {TRACE}ValueError: no such thing\nsecond\n SQLSTATE: 38000"
CHAINED = f"{FAILED}{TRACE}KeyError: 1\n\nDuring handling, another occurred:\n\n{TRACE}pxrs.errors.GroupActive: g\n SQL"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RAISED, "t/0 offset 3: a is missing"),
        (WORKER, "ValueError: no such thing"),
        (CHAINED, "GroupActive: g"),
        (
            "org.apache.spark.SparkRuntimeException: [USER_RAISED_EXCEPTION] a is missing SQLSTATE: P0001",
            "a is missing",
        ),
        ("[OUTPUT_MODE] Invalid output mode: append. SQLSTATE: 42KDE", "[OUTPUT_MODE] Invalid output mode: append"),
        ("", ""),
    ],
)
def test_the_reason_of_a_failure_is_one_line(text: str, reason: str) -> None:
    assert short_reason(text) == reason


@pytest.mark.parametrize("lag", [5, None], ids=["reported by Spark", "not known to Spark"])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_batch_and_an_end_are_a_line_each(capsys: pytest.CaptureFixture[str], as_json: bool, lag: int | None) -> None:
    sink = Sink("pxrs", topic="totals")
    each = QueryRun("totals", "g", "orders", sink, None, "append", None, Path("c"))  # type: ignore[arg-type]
    lines = Lines(SimpleNamespace(queries=[each]), as_json)  # type: ignore[arg-type]
    orders = TopicProgress(1_000, lag)
    batch = BatchReport(2, 1_000, None, 500, 2_000.0, 7, {"orders": orders}, {"addBatch": 400})
    each.batches, each.lag, each.rows_done = [batch], 3, 1_000
    lines.update()
    each.batches, each.state = [], "ended"
    lines.update()
    lines.update()
    started, line, ended = capsys.readouterr().out.splitlines()
    if as_json:
        events = [json.loads(each_line) for each_line in (started, line, ended)]
        assert all(event.pop("time") for event in events)
        assert events[0]["event"] == "started"
        numbers = {"batch": 2, "rows": 1_000, "bytes": None, "duration_ms": 500, "rows_per_s": 2_000.0, "state_rows": 7}
        topics = {"orders": {"rows": 1_000, "lag": lag}}
        assert events[1] == {"event": "batch", "pipeline": "totals", **numbers, "topics": topics, "lag": lag or 3}
        assert events[2] == {"event": "ended", "pipeline": "totals", "rows": 1_000, "lag": 3, "error": None}
    else:
        assert started == "totals: orders to totals, in the group g"
        assert line == f"totals: batch 2, 1,000 rows in 0.5 s (2,000 rows/s), lag {lag or 3}, 7 rows of state"
        assert ended == "totals: ended after 1,000 rows, lag 3"


def test_a_query_that_fails_while_it_is_stopped_has_failed() -> None:
    """It was active when it was looked at, and its trigger is over because it has failed."""
    sink = Sink("pxrs", topic="totals")
    each = QueryRun("totals", "g", "orders", sink, None, "append", None, Path("c"))  # type: ignore[arg-type]
    each.query = SimpleNamespace(
        runId="run",
        isActive=True,
        status={"isTriggerActive": False},
        recentProgress=[],
        exception=lambda: RuntimeError("the staged files are gone"),
        stop=lambda: None,
    )
    with pxrs.open("memory:") as hub:
        run = Run(None, hub, [], HubAddress("memory:"), Path("c"))  # type: ignore[arg-type]
        run.queries = [each]
        run.finish()
        run.look()
    assert run.failed is each
    assert each.error == "the staged files are gone"


def test_signals_are_heard_in_order_when_they_are_waited_for() -> None:
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        assert signals.wait(0) is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert [signals.wait(10), signals.wait(10)] == [signal.SIGTERM, signal.SIGINT]
        assert signals.count == 2
    assert signal.getsignal(signal.SIGTERM) is before
