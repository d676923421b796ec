"""Test suites, checkers and tools for tests of stores and handlers, shipped so that others can use them.

For tests of your own handlers, use the names below: they need nothing beyond pxrs itself, and `pxrs.testing.fixtures`
makes pytest fixtures of them. The other modules hold contract suites for stores, fault injection, checkers and a
simulator; `pxrs.testing.servers` starts real servers and needs the extra `pxrs[testing]`.
"""

from typing import TYPE_CHECKING

__all__ = ["Drained", "Handled", "ManualClock", "drain", "drain_queue", "item", "memory_hub", "message"]

if TYPE_CHECKING:
    from pxrs.clock import ManualClock
    from pxrs.queue.listener import Handled
    from pxrs.testing.handlers import Drained, drain, drain_queue, item, memory_hub, message
else:

    def __getattr__(name: str) -> object:
        """Import what is asked for when it is asked for: the programs of fault tests import this package too, and
        start faster without hubs and queues."""
        if name not in __all__:
            raise AttributeError(f"module 'pxrs.testing' has no attribute {name!r}")
        from pxrs.testing import handlers

        return getattr(handlers, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
