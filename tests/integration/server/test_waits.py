"""Every public call while the server does not answer ends within its limit."""

from __future__ import annotations

import pytest

from pxrs.copying import copier
from pxrs.errors import ReadFailed, RegistryUnavailable
from pxrs.testing.proxy import Proxy
from tests.integration.server.conftest import Running
from tests.integration.waits import COPY_S, PATIENCE_S, TIMEOUT_S, World, check_calls


@pytest.mark.sampled(8, of="waits")
def test_every_public_call_ends_within_its_limit_while_the_server_does_not_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "RETRY_S_MAX", COPY_S)
    host, _, port = running.address.rpartition(":")
    with Proxy(host, int(port)) as proxy:
        url = f"pxrs://{proxy.host}:{proxy.port}?timeout={TIMEOUT_S:g}&patience={PATIENCE_S:g}"
        ended = check_calls(World(url, None, TIMEOUT_S, PATIENCE_S), proxy.stall, proxy.restore)
    for name, kind, limit in (
        ("TopicHandle.read", ReadFailed, f"gave up after {PATIENCE_S:g} s (`patience` in the address)"),
        ("Registry.get", RegistryUnavailable, f"gave up after {TIMEOUT_S:g} s (`timeout` in the address)"),
    ):
        error = ended[name]
        assert isinstance(error, kind)
        assert limit in str(error)
        assert "`pxrs ping`" in str(error)
