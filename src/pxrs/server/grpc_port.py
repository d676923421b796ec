"""The port of a gRPC server."""

from __future__ import annotations

from typing import Any

from pxrs.errors import CannotListen
from pxrs.ports import cannot_listen, fault_of


def bind(server: Any, listen: str, credentials: Any) -> int:
    """Have the server, of `grpc.aio`, listen there once it is started; the port. Raises CannotListen.

    listen: HOST:PORT; port 0 chooses a free one. credentials: what `grpc.ssl_server_credentials` returns; None for a
    port without TLS."""
    problem = "gRPC did not say why"
    try:
        if credentials is None:
            port: int = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:  # its text is an advice to set GRPC_VERBOSITY=debug
        port, problem = 0, str(error).partition("; set GRPC_VERBOSITY")[0]
    if port:
        return port
    fault = fault_of(listen)
    if fault is not None:
        raise cannot_listen(listen, fault) from fault
    advice = "" if credentials is None else "; are the files of the certificate and its key valid PEM?"
    raise CannotListen(f"cannot listen on {listen}: {problem}{advice}")
