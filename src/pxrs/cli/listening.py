"""Checks the addresses that commands are told to listen on."""

from __future__ import annotations

import ipaddress

from pxrs.errors import InvalidArgument


def check_listen(listen: str, *, is_open: bool) -> None:
    """Raise InvalidArgument if this is no address. is_open: also if it can be reached from other hosts."""
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidArgument(f"--listen is {listen!r}: give HOST:PORT, such as 127.0.0.1:7077")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidArgument(f"--listen is {listen!r}: write an IPv6 address in brackets, such as [::1]:7077")
    if not is_open or host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise InvalidArgument(
            f"--listen {listen} is reachable from other hosts, and without --auth every client has full access: pass "
            "--auth FILE, or --insecure on a trusted network"
        )
