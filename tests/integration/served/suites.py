"""Takes the tests of another module, to run them with the fixtures of this folder: over a hub behind a server."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any


def suite(
    module: str,
    *,
    served: Collection[str] = ("hub", "url"),
    local: Collection[str] = (),
    without: Collection[str] = (),
) -> dict[str, Any]:
    """The tests and fixtures of the module, by name.

    served:  the fixtures that are those of this folder, in place of the module's. A test that uses none of them is left
             out: it would run a second time without a server
    local:   fixtures that have no equal over a server; tests that use them are left out
    without: further tests that cannot run over a server, each for the reason beside it; they must exist"""
    found = vars(importlib.import_module(module))
    if missing := [name for name in without if name not in found]:
        raise AssertionError(f"{module} has no {', '.join(missing)} any more")

    def is_chosen(name: str, each: Any) -> bool:
        if name in without or name in served:
            return False
        if name.startswith("test_") and inspect.isfunction(each):
            used = inspect.signature(each).parameters.keys()
            return not used.isdisjoint(served) and used.isdisjoint(local)
        is_class_of_tests = name.startswith("Test") and inspect.isclass(each)
        return is_class_of_tests or type(each).__name__ == "FixtureFunctionDefinition"

    chosen = {name: each for name, each in found.items() if is_chosen(name, each)}
    assert any(name.lower().startswith("test") for name in chosen), f"{module} has no test for a server"
    return chosen
