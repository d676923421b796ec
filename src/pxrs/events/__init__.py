"""Events: what happened to a hub, kept in the internal topics `_events` and `_audit`, and logged under `pxrs.*`.

model.py       `Event`, and its form in a topic
names.py       the table of all events: name, level, text and fields (docs/events.md lists the same)
recording.py   `Recorder`, which groups, queues and upkeep are given; every event is logged here, once
writer.py      `EventWriter`, the recorder of an open hub
buffer.py      `EventBuffer`, bounded: what waits to be stored in one topic, and the thread that stores it
storing.py     where the writer puts events: the topics of a log, or the server that keeps the log
reading.py     reads and follows events
timeline.py    pure: the history of the owners of partitions, rebuilt from events
"""

from pxrs.events.model import Event

__all__ = ["Event"]
