"""The addresses of the page: its files, what it shows as JSON, and its actions.

Functions that use the hub are not coroutines: Starlette runs each on a thread of its pool, because the hub blocks.
An error of pxrs becomes a status with its text and code; any other error is logged, and its text is not sent.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pxrs.errors import InvalidArgument, NotPermitted, PxrsError, RegistryUnavailable, Unauthenticated
from pxrs.queue.states import ItemState
from pxrs.web import browse, cluster, queues, views
from pxrs.web.access import Access, ReadOnly
from pxrs.web.actions import ACTIONS
from pxrs.web.guard import App, Guard
from pxrs.web.history import HOURS
from pxrs.web.observer import Observer
from pxrs.web.plans import Plans

ASSETS: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("app", "dom", "overview", "topic", "group", "queue", "queries", "actions", "timeline", "cluster")
    },
}
ITEMS_MAX: Final = 100
TOKEN_HEADER: Final = "x-pxrs-token"
_logger = logging.getLogger(__name__)


def page(observer: Observer, access: Access | None = None, hosts: tuple[str, ...] = ()) -> App:
    """The page as an ASGI application.

    access: who may read and act; None: everybody may read, nobody may act.
    hosts:  names of the page beside addresses and localhost."""
    routes = _Routes(observer, access or ReadOnly())
    app = Starlette(
        routes=[
            Route("/", routes.index),
            Route("/assets/{name}", routes.asset),
            Route("/api/session", routes.session),
            Route("/api/overview", routes.overview),
            Route("/api/queries", routes.queries),
            Route("/api/cluster", routes.cluster),
            Route("/api/topics/{name}", routes.topic),
            Route("/api/topics/{name}/messages", routes.messages),
            Route("/api/groups/{name}", routes.group),
            Route("/api/groups/{name}/timeline", routes.timeline),
            Route("/api/queues/{name}", routes.queue),
            Route("/api/queues/{name}/items", routes.items),
            Route("/api/actions/{name}", routes.act, methods=["POST"]),
            Route("/api/actions/{name}/preview", routes.preview, methods=["POST"]),
        ],
        exception_handlers={
            PxrsError: _refused,
            ValueError: _refused,
            ClientDisconnect: _left,
            Exception: _failed,
        },
    )
    return Guard(GZipMiddleware(app, minimum_size=4_096, compresslevel=3), hosts)


class _Routes:
    def __init__(self, observer: Observer, access: Access) -> None:
        self._observer, self._access, self._plans = observer, access, Plans()

    def index(self, request: Request) -> Response:
        return _asset("index.html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        return _asset(name) if name in ASSETS else _plain({"error": "there is no such file"}, 404)

    def session(self, request: Request) -> Response:
        return _plain(
            {
                "has_actions": self._access.has_actions,
                "is_open": self._access.is_open,
                "has_cluster": self._observer.cluster.is_there(),
            }
        )

    def overview(self, request: Request) -> Response:
        return self._see(request, lambda: views.overview(self._observer))

    def queries(self, request: Request) -> Response:
        return self._see(request, lambda: views.queries(self._observer))

    def cluster(self, request: Request) -> Response:
        """Reads the registry outside of the observer's lock: the records of a large cluster take a while."""
        self._check_read(request)
        return _plain({**views.status(self._observer), **cluster.view(self._observer.cluster.look())})

    def topic(self, request: Request) -> Response:
        return self._see(request, lambda: views.topic(self._observer, request.path_params["name"]))

    def group(self, request: Request) -> Response:
        return self._see(request, lambda: views.group(self._observer, request.path_params["name"]))

    def timeline(self, request: Request) -> Response:
        hours = _number(request, "hours", float, None)
        if hours is not None and not 0 < hours <= HOURS:
            raise InvalidArgument(f"hours is {hours:g}: give more than 0, up to {HOURS}")
        return self._see(request, lambda: views.group_timeline(self._observer, request.path_params["name"], hours))

    def queue(self, request: Request) -> Response:
        return self._see(request, lambda: views.queue(self._observer, request.path_params["name"]))

    def messages(self, request: Request) -> Response:
        """Reads the log outside of the observer's lock: a slow disk delays this request alone."""
        self._check_read(request)
        name = request.path_params["name"]
        handle = self._observer.hub.topic(name)
        key = request.query_params.get("key")
        time_s = _number(request, "time", float, None)
        asked = browse.Asked(
            _number(request, "partition", int, None),
            _number(request, "offset", int, None),
            None if time_s is None else int(min(max(time_s, -1e11), 1e11) * 1e6),
            None if key is None else key.encode(),
            _number(request, "limit", int, 50),
        )
        found = browse.find(handle.log, asked)
        return _plain(
            {
                "messages": [browse.plain(message) for message in found.messages],
                "next": found.next,
                "searched": found.searched,
                "left_out": found.left_out,
            }
        )

    def items(self, request: Request) -> Response:
        self._check_read(request)
        names = {state.value: state for state in ItemState}
        state = names.get(request.query_params.get("state", "ready"))
        if state is None:
            raise InvalidArgument(f"the state of items is one of {', '.join(names)}")
        found = self._observer.see(lambda: self._observer.queues.find(request.path_params["name"]).queue)
        after = request.query_params.get("after")
        listed = queues.items(self._observer.hub.registry, found, state, after, ITEMS_MAX)
        return _plain({"items": [views.queue_item(each) for each in listed], "is_more": len(listed) == ITEMS_MAX})

    async def preview(self, request: Request) -> Response:
        name, who, given = await self._asked(request)
        if name not in ACTIONS:
            return _plain({"error": "there is no such action"}, 404)
        plan = await run_in_threadpool(ACTIONS[name], self._observer.hub, given)
        shown = {"text": plan.text, "rows": plan.rows[: views.ROWS_MAX], "row_count": len(plan.rows)}
        return _plain({**shown, "plan": self._plans.keep(name, who, plan)})

    async def act(self, request: Request) -> Response:
        name, who, given = await self._asked(request)
        if name not in ACTIONS:
            return _plain({"error": "there is no such action"}, 404)
        if given.get("confirmed") is not True:
            raise InvalidArgument("the action was not confirmed: nothing was changed")
        plan = self._plans.take(given.get("plan"), name, who)
        try:
            done = await run_in_threadpool(plan.perform)
        finally:
            self._observer.forget()
        if who is not None:  # the hub's own record of the action names the user of this process
            await run_in_threadpool(self._observer.hub.record_audit, "act_on_page", who=who, what=done)
        _logger.info("%s, through the page: %s", name, done)
        return _plain({"text": done})

    async def _asked(self, request: Request) -> tuple[str, str | None, Mapping[str, Any]]:
        """The action, who asks for it, and what is given; nothing of it is read without permission."""
        who = await run_in_threadpool(self._access.check_act, request.headers.get(TOKEN_HEADER))
        return request.path_params["name"], who, await _body(request)

    def _see(self, request: Request, view: Callable[[], Mapping[str, Any]]) -> Response:
        self._check_read(request)
        return _plain(self._observer.see(view))

    def _check_read(self, request: Request) -> None:
        self._access.check_read(request.headers.get(TOKEN_HEADER))


def _asset(name: str) -> Response:
    return Response(files("pxrs.web").joinpath("assets", name).read_bytes(), media_type=ASSETS[name])


async def _body(request: Request) -> Mapping[str, Any]:
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise InvalidArgument("the body is no JSON") from None
    if not isinstance(found, dict):
        raise InvalidArgument("the body is no JSON object")
    return found


def _number(request: Request, name: str, kind: Callable[[str], Any], default: Any) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        found = kind(text) if len(text) <= 30 else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidArgument(f"{name} is no number")
    return found


def _plain(found: Mapping[str, Any], status: int = 200) -> Response:
    try:
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a record has a time that is no number
        text = json.dumps(_finite(found), separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _finite(value: Any) -> Any:
    """The same without numbers that JSON cannot express."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, PxrsError):
        return _failed(request, error)
    if isinstance(error, Unauthenticated):
        status = 401
    elif isinstance(error, NotPermitted):
        status = 403
    elif isinstance(error, KeyError):  # UnknownTopic, UnknownGroup, UnknownQueue
        status = 404
    elif isinstance(error, InvalidArgument):
        status = 400
    else:
        status = 503 if isinstance(error, RegistryUnavailable) else 409
    return _plain({"error": str(error), "code": error.code}, status)


def _left(request: Request, error: Exception) -> Response:
    """The client has closed its connection before it had sent the whole request: nobody reads the answer."""
    _logger.debug("a client of the page has left before its request was complete")
    return Response(status_code=400)


def _failed(request: Request, error: Exception) -> Response:
    _logger.error("a request of the page has failed", exc_info=error)
    return _plain({"error": "the page has failed: see its log", "code": "web.failed"}, 500)
