"""Checks that something can be a handler, whether a program passes the function or a command names it.

An async function or a generator function does nothing when it is called: it returns an object that would have to be
run. If such a function were accepted, every message and every item would count as done although nothing has handled it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

OF_A_MESSAGE: Final = ("one message",)
OF_AN_ITEM: Final = ("a transaction", "an item")
"""The arguments that handlers get, as error messages name them."""
_PLAIN: Final = "use a plain function, neither async nor a generator"


def fault_of(name: str, handler: Any, of: Sequence[str]) -> str:
    """For an error message: why `handler` cannot be called with these arguments; empty if it can.

    name: what the message calls the handler.
    of:   names of the arguments, such as OF_A_MESSAGE."""
    words = " and ".join(of)
    if not callable(handler):
        return f"{name} is of type {type(handler).__name__}, but must be a function of {words}"
    if _is_lazy(handler) or _is_lazy(type(handler).__call__):
        return f"{name} is an async or generator function, but async handlers are not supported: {_PLAIN}"
    try:
        signature = inspect.signature(handler)
    except ValueError:  # a function in C, which may have no signature
        return ""
    try:
        signature.bind(*(None for _ in of))
    except TypeError as error:
        return f"{name}{signature} cannot be called with {words}: {error}"
    return ""


def check_result(result: object) -> None:
    """Raise TypeError if a handler has returned a coroutine or a generator, and so has done nothing. `fault_of` cannot
    always see that, for example if the handler is a wrapper."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        raise TypeError(f"the handler returned a {type(result).__name__} instead of doing its work: {_PLAIN}")


def _is_lazy(function: Any) -> bool:
    return (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    )
