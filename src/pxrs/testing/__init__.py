"""What proves a store or a handler, shipped for others to use.

For tests of one's own handlers, the names below: they need nothing beyond pxrs itself, and `pxrs.testing.fixtures`
makes pytest fixtures of them. The other modules hold contract suites for stores, fault injection, checkers and a
simulator; `pxrs.testing.servers` starts real servers and needs the extra `pxrs[testing]`.
"""

from pxrs.clock import ManualClock
from pxrs.queue.listener import Handled
from pxrs.testing.handlers import Drained, drain, drain_queue, item, memory_hub, message

__all__ = ["Drained", "Handled", "ManualClock", "drain", "drain_queue", "item", "memory_hub", "message"]
