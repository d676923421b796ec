"""A thread pool for work whose result nobody waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class ToldPool(ThreadPoolExecutor):
    """A ThreadPoolExecutor that logs the exception of a submitted function: no caller reads the function's result."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(_tell)
        return future

    @property
    def is_crowded(self) -> bool:
        """Whether functions wait for a thread."""
        return not self._work_queue.empty()


def _tell(future: Future[T]) -> None:
    try:
        error = future.exception()
    except CancelledError:  # the pool was shut down before the function began
        return
    if error is not None:
        _logger.error("a background task of the broker failed unexpectedly", exc_info=error)
