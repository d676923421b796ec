"""The limit of open files, of which each connection of a client takes one.

Clients without a token can open connections too. If they could take all descriptors, the server could not open the
files of the hub any more, and no append of any client would be stored.
"""

from __future__ import annotations

import logging
from typing import Final

_logger = logging.getLogger(__name__)

RESERVED: Final = 1_024
"""How many descriptors are left for the files of the hub, if the limit is large enough; else half of them."""
RAISED_MAX: Final = 1 << 20


def connections_within(wanted: int) -> int:
    """Raise this process's limit of open files as far as its user may; then how many connections of clients it leaves
    room for, up to `wanted`."""
    import resource  # not available on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, RAISED_MAX)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    room = max(soft - RESERVED, soft // 2)
    if room < wanted:
        _logger.warning(
            "connections_max is %d instead of %d: this process may have %d open files; raise that with `ulimit -n` "
            "(for a systemd service: LimitNOFILE=)",
            room,
            wanted,
            soft,
        )
    return min(wanted, room)
