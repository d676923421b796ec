"""Parses the texts of options into Python values. Every mistake is an InvalidOption that names the option and its
choices."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from pxrs.errors import InvalidGroup, InvalidOption
from pxrs.group.assign import assignor_named
from pxrs.model import microseconds_of
from pxrs.publishing.selection import EARLIEST, Boundary, Topics
from pxrs.spark.option_names import NO_TABLE, known_values

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp")
TOPIC: Final = "topic"
HEADERS: Final = "headers"
"""The columns of a topic's rows. `topic` is there if several topics may be read or the user asks for it, and `headers`
with includeHeaders."""

_COUNT_MAX: Final = 1 << 62
_PARTITION: Final = re.compile("0|[1-9][0-9]*")
_APP: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DURATION: Final = re.compile(r"([0-9]{1,15})\s*(us|ms|s|m|min|h|d)?")
_UNIT_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_OFFSETS: Final = '{"0": 23, "1": -2}, or {"orders": {"0": 23, "1": -2}} for several topics; -2 is earliest, -1 latest'
_TIMES: Final = '{"orders": {"0": 1700000000000, "1": 1700000000000}}, in milliseconds since 1970'
_ASSIGN: Final = '{"orders": [0, 2], "returns": [1]}'


class Given:
    """The options of one reader or writer, by their names."""

    def __init__(
        self, options: Mapping[str, str], known: tuple[str, ...], of: str, elsewhere: Iterable[str] = ()
    ) -> None:
        """Raises InvalidOption for unknown options. The arguments are those of `known_values`."""
        self._values = known_values(options, known, of, elsewhere)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise InvalidOption(name, "it is empty")
        return value

    def required(self, name: str, what: str) -> str:
        value = self.text(name)
        if value is None:
            # Without any option, the source was most likely used by CREATE TABLE, for which Spark passes none.
            raise InvalidOption(name, f"missing; {what}" if self._values else f"missing; {what}. {NO_TABLE}")
        return value

    def count(self, name: str) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        if not value.strip().isdecimal() or not 0 < int(value) < _COUNT_MAX:
            raise InvalidOption(name, f"{value!r}; give a whole number of at least 1")
        return int(value)

    def transaction(self) -> tuple[str | None, int | None]:
        """The values of txnAppId and txnVersion."""
        app, version = self.text("txnAppId"), self.text("txnVersion")
        if app is not None and version is None:
            raise InvalidOption("txnVersion", "missing; it numbers the writes of txnAppId")
        if app is not None and not _APP.fullmatch(app.strip()):
            raise InvalidOption("txnAppId", f"{app!r}; give letters, digits, dots, dashes and underscores, at most 128")
        if version is not None and (not version.strip().isdecimal() or int(version) >= 1 << 31):
            raise InvalidOption("txnVersion", f"{version!r}; give a whole number of at least 0, such as the batch's")
        return None if app is None else app.strip(), None if version is None else int(version)

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.strip().lower() not in ("true", "false"):
            raise InvalidOption(name, f"{value!r}; give true or false")
        return value.strip().lower() == "true"

    def word(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first one by default."""
        value = self.text(name)
        if value is None:
            return choices[0]
        if value.strip().lower() not in choices:
            raise InvalidOption(name, f"{value!r}; give {' or '.join(choices)}")
        return value.strip().lower()

    def seconds(self, name: str) -> float | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= 86_400:
            raise InvalidOption(name, f"{value!r}; give seconds, more than 0 and at most a day")
        return seconds

    def duration_s(self, name: str) -> float | None:
        """A duration as Spark writes it, such as 10s or 15m, in seconds. A number alone is milliseconds."""
        value = self.text(name)
        if value is None:
            return None
        found = _DURATION.fullmatch(value.strip().lower())
        if found is None or not int(found[1]):
            raise InvalidOption(name, f"{value!r}; give a duration such as 500ms, 10s, 15m, 2h or 1d")
        return int(found[1]) * _UNIT_S[found[2] or "ms"]

    def assignor(self) -> str:
        value = self.text("assignor")
        if value is None:
            return "sticky"
        try:
            assignor_named(value.strip())
        except InvalidGroup as error:
            raise InvalidOption("assignor", str(error)) from error
        return value.strip()

    def topics(self) -> Topics:
        """The topics that are read."""
        forms = [name for name in ("topic", "subscribe", "subscribePattern", "assign") if name in self._values]
        if not forms:
            raise InvalidOption(TOPIC, "missing; give the topic's name, or subscribe, subscribePattern or assign")
        if forms == ["topic", "subscribe"]:
            raise InvalidOption("subscribe", "it is an alias of topic: give only one of them")
        if len(forms) > 1:
            raise InvalidOption(forms[-1], f"{' and '.join(forms)} all name the topics to read: give one of them")
        if names := self._named_topics():
            return Topics(names)
        if (pattern := self.text("subscribePattern")) is not None:
            try:
                re.compile(pattern.strip())
            except re.error as error:
                raise InvalidOption(
                    "subscribePattern", f"{pattern!r} is not a regular expression of Python's re: {error}"
                ) from None
            return Topics(pattern=pattern.strip())
        return Topics(assigned=self._assigned())

    def _named_topics(self) -> tuple[str, ...] | None:
        """The topics that `topic` or `subscribe` names, None if neither is given."""
        given = [name for name in ("topic", "subscribe") if name in self._values]
        if len(given) > 1:
            raise InvalidOption("subscribe", "it is an alias of topic: give only one of them")
        if not given:
            return None
        names = tuple(name.strip() for name in (self.text(given[0]) or "").split(","))
        for place, name in enumerate(names):
            if not name:
                raise InvalidOption(given[0], "it has an empty name between two commas; remove the extra comma")
            if name in names[:place]:
                raise InvalidOption(given[0], f"{name} is given twice")
        return names

    def _assigned(self) -> dict[str, tuple[int, ...]]:
        found = self._json("assign", _ASSIGN)
        for topic, numbers in found.items():
            if not isinstance(numbers, list) or not numbers or not all(map(_is_partition, numbers)):
                raise InvalidOption("assign", f"{topic}: {json.dumps(numbers)}; give JSON such as {_ASSIGN}")
            if len(set(numbers)) < len(numbers):
                raise InvalidOption("assign", f"{topic}: a partition is given twice")
        return {topic: tuple(sorted(numbers)) for topic, numbers in found.items()}

    def columns(self) -> tuple[str, ...]:
        """The columns of the rows: those that the user names, in that order; by default all."""
        has_headers = self.flag("includeHeaders", False)
        choices = ("key", "value", TOPIC, "partition", "offset", "timestamp", *((HEADERS,) if has_headers else ()))
        value = self._values.get("columns")
        if value is None:
            has_topic = self.flag("includeTopic", False) or self._may_be_several()
            return tuple(name for name in choices if has_topic or name != TOPIC)
        names = tuple(name.strip() for name in value.split(","))
        advice = f"give some of {', '.join(choices)}, with commas between them"
        for place, name in enumerate(names):
            if name == HEADERS and not has_headers:
                raise InvalidOption("columns", f"headers needs includeHeaders=true; otherwise {advice}")
            if name not in choices:
                raise InvalidOption("columns", f"{name!r} is not a column; {advice}")
            if name in names[:place]:
                raise InvalidOption("columns", f"{name!r} is given twice; {advice}")
        return names

    def _may_be_several(self) -> bool:
        """Whether the options may name several topics. This does not raise for wrong options, as `topics` does: Spark
        also calls the source for its columns when the options are those of a write."""
        if "subscribePattern" in self._values or "assign" in self._values:
            return True
        return "," in self._values.get("topic", self._values.get("subscribe", ""))

    def starting(self, topics: Topics, words: tuple[str, ...]) -> Boundary:
        """Where the reading begins: one of startingOffsets, startingTimestamp and startingOffsetsByTimestamp. Without
        any of them, the first of `words`."""
        must_match = self.word("startingOffsetsByTimestampStrategy", ("latest", "error")) == "error"
        boundary = self._boundary("starting", topics, words, must_match)
        if "startingOffsetsByTimestampStrategy" in self._values and boundary.option.endswith("Offsets"):
            raise InvalidOption(
                "startingOffsetsByTimestampStrategy",
                "it takes effect only with startingTimestamp or startingOffsetsByTimestamp: give one of them",
            )
        return boundary

    def ending(self, topics: Topics) -> Boundary:
        """Where a batch ends."""
        return self._boundary("ending", topics, ("latest",), False)

    def _boundary(self, end: str, topics: Topics, words: tuple[str, ...], must_match: bool) -> Boundary:
        names = (f"{end}Offsets", f"{end}OffsetsByTimestamp", f"{end}Timestamp")
        given = [name for name in names if self.text(name) is not None]
        if len(given) > 1:
            raise InvalidOption(given[-1], f"{given[0]} is given as well: give only one of them")
        option = given[0] if given else names[0]
        value = self._values.get(option, words[0]).strip()
        if option == names[2]:
            return Boundary(option, words[0], time_us=_time_us(option, value), must_match=must_match)
        if option == names[1]:
            times = self._by_topic(option, topics, _TIMES)
            times_us = {
                topic: {number: _time_us(option, str(time)) for number, time in each.items()}
                for topic, each in times.items()
            }
            return Boundary(option, words[0], times_us=times_us, must_match=must_match)
        if value in words:
            return Boundary(option, value)
        if not value.startswith("{"):
            raise InvalidOption(option, f"{value!r}; give {', '.join(words)}, or JSON such as {_OFFSETS}")
        offsets = self._by_topic(option, topics, _OFFSETS)
        if any(type(offset) is not int or offset < EARLIEST for each in offsets.values() for offset in each.values()):
            raise InvalidOption(option, f"{value!r}; give JSON such as {_OFFSETS}")
        return Boundary(option, words[0], offsets)

    def _by_topic(self, name: str, topics: Topics, example: str) -> dict[str, dict[int, Any]]:
        """JSON with a value for each partition. With one topic, its name may be left out."""
        found = self._json(name, example)
        if topics.only is not None and not all(isinstance(each, dict) for each in found.values()):
            found = {topics.only: found}
        for topic, each in found.items():
            if not isinstance(each, dict) or not each or not all(map(_PARTITION.fullmatch, each)):
                raise InvalidOption(name, f"{topic}: {json.dumps(each)}; give JSON such as {example}")
        return {topic: {int(key): value for key, value in each.items()} for topic, each in found.items()}

    def _json(self, name: str, example: str) -> dict[str, Any]:
        text = (self.text(name) or "").strip()
        try:
            found = json.loads(text, object_pairs_hook=_unique)
        except ValueError as error:
            raise InvalidOption(name, f"{text!r}: {error}; give JSON such as {example}") from None
        if not isinstance(found, dict) or not found:
            raise InvalidOption(name, f"{text!r}; give JSON such as {example}")
        return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError if a name is given twice: Python would silently take the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        again, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{json.dumps(again)} is given twice")
    return found


def _is_partition(value: object) -> bool:
    return type(value) is int and value >= 0


def _time_us(option: str, value: str) -> int:
    if value.removeprefix("-").isdecimal():
        return int(value) * 1000
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidOption(
            option, f"{value!r}; give milliseconds since 1970, or a time such as 2026-01-31T12:00:00+00:00"
        ) from None
    if moment.tzinfo is None:
        raise InvalidOption(option, f"{value!r} has no time zone; give one, such as +00:00")
    return microseconds_of(moment)
