"""Why a server cannot listen on an address, in words that say what to do."""

from __future__ import annotations

import errno
import os
import socket

from pxrs.errors import CannotListen


def cannot_listen(listen: str, error: OSError, what: str = "") -> CannotListen:
    """The error for an address, HOST:PORT, on which `bind` or `listen` failed with this error.

    what: for what the address is, if a process has several, such as " for metrics"."""
    if error.errno == errno.EADDRINUSE:
        why = "the address is in use: stop the process that listens there, or choose another port"
    elif error.errno == errno.EADDRNOTAVAIL:
        why = "this machine has no such address: choose one that it has, or 0.0.0.0 for all that it has"
    elif error.errno == errno.EACCES:
        why = "this user may not use the port: choose one from 1024 on"
    elif isinstance(error, socket.gaierror):
        why = f"the host is not known ({error.strerror}): correct it, or give an address such as 127.0.0.1"
    else:
        why = os.strerror(error.errno) if error.errno else str(error)
    return CannotListen(f"cannot listen{what} on {listen}: {why}")


def fault_of(listen: str) -> OSError | None:
    """Why this address, HOST:PORT, cannot be listened on at the moment; None if it can. For servers of a library that
    does not tell."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    except ValueError:  # it is not HOST:PORT
        return None
    return None
