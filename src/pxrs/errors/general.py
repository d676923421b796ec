"""The base of every error, and the errors that belong to no single part: arguments, closing, forking, permissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar


class PxrsError(Exception):
    """The base of every error that pxrs raises on purpose.

    The text says what happened, and is the only argument of the exception (`args`). The facts are attributes. Both,
    with the notes and the text of the cause, survive pickling and `pxrs.errors.wire`."""

    code = "error"
    """Names this class in logs, over the wire and for programs in other languages. It never changes, even if the class
    is renamed. Every class has its own."""
    original_code: str | None = None
    """The code that a newer version has sent and that this version does not know: this object then is of the nearest
    base that it knows. None otherwise."""

    def __str__(self) -> str:
        # Not that of KeyError, which shows the text as a Python literal.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()

    def state(self) -> dict[str, object]:
        """The facts, and the notes that were added on the error's way, by the names of their attributes."""
        return dict(vars(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the constructor: its arguments need not be the attributes, and the text stays as it was."""
        return restore, (type(self), self.args, self.state(), described(self.__cause__))

    def __copy__(self) -> Self:
        return restore(type(self), self.args, self.state())


class InvalidArgument(PxrsError, ValueError):
    """An argument is not allowed; the message names it, shows what was given and says what is. Nothing was done.

    The base of the errors of this kind that belong to one part: InvalidGroup, InvalidTopic, InvalidQueue and others."""

    code = "invalid-argument"


class InvalidUrl(InvalidArgument):
    """An address cannot be understood: unknown scheme, unknown option, a path that is a file. Correct the address."""

    code = "invalid-url"


class CannotListen(InvalidArgument):
    """A server cannot have the address that it is to listen on: another process has the port, or the host has no such
    address. Stop the other process, or give another address."""

    code = "cannot-listen"


class MissingDependency(PxrsError, ImportError):
    """The chosen store needs a driver that is not installed. Install the extra that the message names. `name` is the
    module that could not be imported, if that is known."""

    code = "missing-dependency"

    def __init__(self, what: str, *, name: str | None = None) -> None:
        self.what = what
        super().__init__(what, name=name)

    @classmethod
    def of_extra(cls, user: str, name: str | None, extra: str) -> Self:
        """user: what needs the module `name`, which the extra of pxrs with this name brings."""
        return cls(f"{user} needs {name}: {installing(extra)}", name=name)

    def state(self) -> dict[str, object]:
        return {**super().state(), "name": self.name}  # ImportError keeps it outside `vars`


class UnsupportedPlatform(PxrsError):
    """The operating system or file system cannot give the guarantees that are needed. Choose another store."""

    code = "unsupported-platform"


class Closed(PxrsError):
    """The object was closed before this call. Open a new one."""

    code = "closed"


class UsedAfterFork(PxrsError):
    """An object made before `fork` was used in the child. Open a new one in the child; the parent's is untouched."""

    code = "used-after-fork"


class NoWritePermission(PxrsError):
    """This process may read the hub or the registry but not write to it, and the call has to write. Nothing was written
    there. `path` is the file or folder that it lacks the permission for.

    Run the process as a user that has the permission, or give it, for all of the directory; then open the hub again.
    What needs no write permission: docs/log.md, "Reading without write permission"."""

    code = "no-write-permission"

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(what)


class WrongRegistry(PxrsError):
    """This process has another registry than the one that its hub belongs to, so it may neither apply `keep_unread`
    nor read as a member of a group nor change groups or queues there; nothing was done.

    Give the hub's own registry, which `recorded` shows; or, if the hub is to belong to the registry that was given, run
    `pxrs registry adopt` when no member of a group is left in the old one."""

    code = "wrong-registry"

    def __init__(self, place: str, recorded: str, given: str) -> None:
        self.place, self.recorded, self.given = place, recorded, given
        if recorded == given:
            what = f"the hub {place} belongs to another registry than the one that is at {given} now, which was emptied"
            what += " or replaced: restore it"
        else:
            what = f"the hub {place} belongs to the registry {recorded}, and this process has {given}: give it the "
            what += "former with --registry, PXRS_REGISTRY or pxrs.open(registry=...)"
        super().__init__(
            f"{what}; to make the hub belong to {given}, run `pxrs registry adopt --at {place} --registry {given}`"
        )


class RetentionPostponed(PxrsError):
    """Retention of a topic with `keep_unread` removes nothing for now; the message says why and what to do."""

    code = "retention-postponed"


def installing(extra: str) -> str:
    """How to install the packages of an extra of pxrs, for error messages.

    There is no release of pxrs on a package index yet, so `pip install 'pxrs[...]'` would fail, or install something
    else. With the first release this becomes f"pip install 'pxrs[{extra}]'"."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and needed for errors alone

    try:
        number = version("pxrs")
    except PackageNotFoundError:  # run from a folder of sources
        number = "VERSION"
    return (
        f"pip install '.[{extra}]' in a checkout of pxrs, or pip install 'pxrs-{number}-py3-none-any.whl[{extra}]' "
        "with the wheel"
    )


def differing(what: str, differences: Mapping[str, tuple[object, object]]) -> str:
    settings = "; ".join(
        f"{name} is {there!r}, and {asked!r} was asked for" for name, (there, asked) in differences.items()
    )
    return f"there is a {what} already, with other settings: {settings}"


class RemoteCause(Exception):
    """Stands for the cause of an error that came from another process: the name of its class and its text."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(kind, text)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


E = TypeVar("E", bound=PxrsError)


def restore(kind: type[E], args: tuple[Any, ...], state: Mapping[str, object], cause: BaseException | None = None) -> E:
    """An error of this class with this text and these attributes, made without its constructor."""
    error = kind.__new__(kind)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    error.__cause__ = cause
    return error


def described(cause: BaseException | None) -> BaseException | None:
    """A cause that can be sent to another process: an error of pxrs as it is, another one by its class and text."""
    if cause is None or isinstance(cause, PxrsError | RemoteCause):
        return cause
    return RemoteCause(f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins."), str(cause))
