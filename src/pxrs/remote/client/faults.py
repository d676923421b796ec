"""What a failed call of gRPC proves, and how the client's own failures are told from the server's answers.

An error of the hub behind the server comes as a dictionary: as the answer to a call, or in the trailing metadata
`pxrs-error-bin` of a stream. It is raised as it was there. Everything else means that no answer came: `Unanswered`,
which says whether the request may have reached the server (W1). The layers above turn that into an error of the
registry or the log.
"""

from __future__ import annotations

import re
from typing import Any, Final

import grpc

from pxrs.errors import Closed, InvalidArgument, NotPermitted, PxrsError, ServerBusy, Unauthenticated, WireMismatch
from pxrs.remote import wire

AWAY: Final = (Closed, ServerBusy)
"""Answers of a server that is ending or has no room: the call had no effect there, and may work later."""
_LASTING: Final = (WireMismatch, Unauthenticated, NotPermitted, InvalidArgument)
"""Answers to a hello that will be the same if it is sent again."""
_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)
"""Statuses without an error of pxrs that will be the same if the call is made again."""


_WORDS_OF_GRPC: Final = re.compile(
    r"failed to connect to all addresses; last error: \w+: (ipv[46]:\S+: )?(Failed to connect to remote host: )?"
)
"""What gRPC writes before the reason of a failed connection; the address is told otherwise."""


class Unanswered(Exception):
    """No answer came: the server could not be reached, the stream ended, or the time was over."""

    def __init__(self, text: str, *, was_sent: bool) -> None:
        super().__init__(text)
        self.was_sent = was_sent
        """Whether the request may have reached the server. False proves that it had no effect."""


class Refused(Unanswered):
    """Something at the address answers, but not as a server of pxrs does. Trying again will not help."""

    def __init__(self, text: str) -> None:
        super().__init__(text, was_sent=False)


class NothingListens(Unanswered):
    """No server was ever reached, and every server of the address has refused each connection for some time."""

    def __init__(self, text: str) -> None:
        super().__init__(text, was_sent=False)


def error_in(failure: Any) -> PxrsError | None:
    """The error of pxrs that a server has put into the trailing metadata of a failed call."""
    for name, value in failure.trailing_metadata() or ():
        if name == wire.ERROR_METADATA:
            try:
                return wire.error_of(wire.loads(value))
            except (ValueError, TypeError, AttributeError):  # not of a server of pxrs
                return None
    return None


def text_of(failure: Any) -> str:
    """What gRPC says about a failed call."""
    code = failure.code()
    details = _WORDS_OF_GRPC.sub("", failure.details() or "no details")
    return f"{details} ({'unknown' if code is None else code.name})"


def is_lasting(failure: Any) -> bool:
    """Whether a call that has failed without an error of pxrs will fail again."""
    is_too_long = failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (
        failure.details() or ""
    )
    return is_too_long or failure.code() in _REFUSALS


def lasting_refusal(failure: Any, where: str) -> Exception | None:
    """Why a control stream that ended before the server's hello will end in the same way again; None if it may not."""
    error = error_in(failure)
    if error is not None:
        return error if isinstance(error, _LASTING) else None
    return Refused(f"{where}: no server of pxrs answers there: {text_of(failure)}") if is_lasting(failure) else None
