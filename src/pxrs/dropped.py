"""What the finalizers of objects that were not closed call: `apart`, which closes on another thread, and `warn`.

The garbage collector may run a finalizer on any thread at any point, also while that thread holds a lock of pxrs. A
finalizer that waits for this lock would deadlock. So the finalizers of pxrs take no lock and make no request: they
start a thread that closes the object's resources, then warn. The warning comes last because it may raise: a program may
have turned warnings into errors."""

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
    """Issue a ResourceWarning: the object `name` was garbage-collected without `close()`; `what` happens now."""
    warnings.warn(f"{name} was dropped without close(): {what}", ResourceWarning, stacklevel=3, source=source)


def apart(call: Callable[..., object], *given: Any) -> None:
    """Make the call on a new thread. Takes no lock, so that finalizers may use it.

    An error of the call is logged, because there is no caller to raise it to. While the interpreter is exiting, nothing
    is called: the end of the process closes everything."""
    if sys.is_finalizing():
        return
    try:
        # `Thread.start` waits for a lock, so it must not be called on this thread; a second thread calls it. The call
        # itself cannot run on a thread of `_thread` alone: once such a thread calls `threading.current_thread`, the
        # module `threading` keeps an entry for it for ever.
        _thread.start_new_thread(_start, (call, given))
    except RuntimeError as error:  # the limit of threads is reached, or the interpreter is exiting
        _logger.warning("%r could not be called: %s", call, error)


def _start(call: Callable[..., object], given: tuple[Any, ...]) -> None:
    threading.Thread(target=_make, args=(call, given), name="pxrs-dropped", daemon=True).start()


def _make(call: Callable[..., object], given: tuple[Any, ...]) -> None:
    try:
        call(*given)
    except Exception as error:
        _logger.warning("closing an object that was dropped without close() failed: %s", error, exc_info=error)
