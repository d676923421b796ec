"""Objects that hold something open and are dropped without `close()`: a warning, and the end of what they held.

The garbage collector runs a finalizer on whatever thread it happens to run on, in the middle of whatever that thread
does, also while it holds a lock of ours. A finalizer that takes a lock can therefore wait for itself for ever. So the
finalizers here take no lock and make no request: they have a thread of its own do the closing, then warn. The warning
comes last because it may raise: a program may have turned warnings into errors."""

from __future__ import annotations

import _thread
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger(__name__)


def warn(name: str, what: str, source: object) -> None:
    """Tell that an object was dropped without `close()`, and what becomes of what it held."""
    warnings.warn(f"{name} was dropped without close(): {what}", ResourceWarning, stacklevel=3, source=source)


def apart(call: Callable[..., object], *given: Any) -> None:
    """Make the call on a thread of its own. Takes no lock, so that finalizers may use it.

    An error of the call is logged: nobody is there to whom it could be raised. While the interpreter ends nothing is
    begun; the end of the process closes everything."""
    if sys.is_finalizing():
        return
    try:
        # `Thread.start` waits for a lock, and must not be called here. But it must be called, for a thread that the
        # module `threading` has not started stays in its list for ever once it asks who it is.
        _thread.start_new_thread(_start, (call, given))
    except RuntimeError as error:  # the process has as many threads as it may have, or ends just now
        _logger.warning("%r could not be called: %s", call, error)


def _start(call: Callable[..., object], given: tuple[Any, ...]) -> None:
    threading.Thread(target=_make, args=(call, given), name="pxrs-dropped", daemon=True).start()


def _make(call: Callable[..., object], given: tuple[Any, ...]) -> None:
    try:
        call(*given)
    except Exception as error:
        _logger.warning("closing what was dropped without close() failed: %s", error, exc_info=error)
