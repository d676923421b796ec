"""What can be a handler: one check, for who gives a function and for who names one.

A function that only returns work, as an async one does, would have every message and every item counted as done."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

OF_A_MESSAGE: Final = ("one message",)
OF_AN_ITEM: Final = ("a transaction", "an item")
"""What handlers are called with."""
_PLAIN: Final = "give a plain function, neither async nor a generator"


def fault_of(name: str, handler: Any, of: Sequence[str]) -> str:
    """Why it cannot be called with these, to be told to people; empty if it can. name: what they call it."""
    words = " and ".join(of)
    if not callable(handler):
        return f"{name} is {type(handler).__name__}, and not a function of {words}"
    if _is_lazy(handler) or _is_lazy(type(handler).__call__):
        return f"{name} does nothing when it is called: {_PLAIN}"
    try:
        signature = inspect.signature(handler)
    except ValueError:  # of C code, which may have none
        return ""
    try:
        signature.bind(*(None for _ in of))
    except TypeError as error:
        return f"{name}{signature} cannot be called with {words}: {error}"
    return ""


def check_result(result: object) -> None:
    """Raise TypeError if a handler has done nothing and returned what would: seen only when it is called."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        raise TypeError(f"the handler has done nothing, and returned a {type(result).__name__}: {_PLAIN}")


def _is_lazy(function: Any) -> bool:
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )
