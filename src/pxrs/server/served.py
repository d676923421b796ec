"""What a server stands in front of: one open hub."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pxrs.errors import TopicDeleted, UnknownTopic
from pxrs.hub import Hub
from pxrs.log.contract import TopicLog
from pxrs.publishing.staging.contract import StagingStore
from pxrs.server.auth.gate import ANYONE, Caller, Gate
from pxrs.server.given import Given
from pxrs.server.grants import Grants

Result = dict[str, Any]
"""The result of a call, as JSON."""
Send = Callable[[bytes], Awaitable[None]]
"""Sends one message to the client, as fast as the client reads."""


class Stalled(Exception):
    """A client does not take what the server sends. The stream ends with the status UNAVAILABLE and without an error of
    pxrs, because such an error would tell the client that nothing was stored."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the server stands in front of, for one caller."""

    hub: Hub
    grants: Grants
    instance: str
    """New with each start of the server."""
    gate: Gate
    staging: StagingStore | None = None
    """Where the rows of Spark's tasks are staged; None if the hub is neither in a directory nor in a cluster."""
    caller: Caller = ANYONE
    is_direct: bool = False
    """The caller wants no other server to be asked (`wire.DIRECT_METADATA`)."""

    def check(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Raise an error if the caller may not make this call with these arguments (W4). May block."""
        self.gate.check(self.caller, call, arguments)

    def permitted_topic(self, given: Given) -> TopicLog:
        """The topic that the arguments name, if the caller may make the call."""
        self.check(given.call, given.found)
        return self.topic(given)

    def topic(self, given: Given) -> TopicLog:
        """The topic that the arguments name. Raises TopicDeleted if the topic of this name has another id."""
        name, wanted = given.text("topic"), given.text_or_none("topic_id")
        try:
            found = self.hub.topic(name).log
            if wanted is not None and found.id != wanted:
                found = self.hub.log.topic_now(name)
        except UnknownTopic as error:
            if wanted is None:
                raise self.gate.shown(self.caller, error) from None
            raise TopicDeleted(name, wanted, is_made_again=False) from None
        if wanted is not None and found.id != wanted:
            raise TopicDeleted(name, wanted, is_made_again=True)
        return found.local if self.is_direct else found
