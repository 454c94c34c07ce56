"""The ingress: all routes of the app as a Starlette application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute

from app.api.completion import Completion
from app.api.console import AskAll, Console
from app.api.generation import Generation, RendererPort
from app.api.http import ReaderWatch, clean_request_id, dump_json, http_path
from app.api.preparation import Preparation
from app.api.requests import Ask, Everywhere, Requests
from app.api.shortening import Shortener
from app.errors import InternalError, InvalidRequest, MethodNotAllowed, NotFound, RequestError
from app.telemetry.access_log import AccessLog
from app.telemetry.ledger import Ledger
from app.types import JsonObject

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from app.config import SluiceConfig
    from app.pools.client import HealthWatch, PoolClient
    from app.pools.dispatcher import Dispatcher
    from app.routing.keys import Keys
    from app.telemetry.metrics import RequestMetrics
    from app.telemetry.record import RecordSink
    from app.telemetry.tracing import Tracing
    from app.types import Route


class ModelListing(RendererPort, Protocol):
    """A renderer that can also list the models."""

    async def models(self) -> JsonObject:
        """OpenAI's list of models."""


class IngressApp:
    """All routes."""

    def __init__(
        self,
        generations: Mapping[str, Generation],
        rest: ASGIApp,
        dispatcher: Dispatcher,
        requests: Requests,
        everywhere: Everywhere,
        console: Console,
    ) -> None:
        self._generations = generations
        self._rest = rest
        self._dispatcher = dispatcher
        self.requests = requests
        self.everywhere = everywhere
        self.console = console

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration, with the same pools, from the next request on."""
        for generation in self._generations.values():
            generation.configure(config)
        self._dispatcher.configure(config)
        self.console.configure(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # The generation routes answer every error themselves; Starlette's layers would only cost time per token.
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            direct = self._generations.get(path.removeprefix(scope.get("root_path", "")))
            if direct is not None:
                await direct(scope, receive, send)
                return
        await self._rest(scope, receive, send)


def build_app(
    config: SluiceConfig,
    renderer: ModelListing,
    pools: Mapping[str, PoolClient],
    dispatcher: Dispatcher,
    health: HealthWatch,
    tracing: Tracing,
    metrics: RequestMetrics,
    keys: Keys,
    ask: Ask | None = None,
    ask_all: AskAll | None = None,
    more_sinks: Sequence[RecordSink] = (),
) -> IngressApp:
    """The application; nothing in it knows how its parts reach Ray or vLLM. `more_sinks`: who else wants records."""

    readers = ReaderWatch(config.ingress.slow_reader_timeout_s)
    requests = Requests()
    ledger = Ledger(config.ingress.kept_requests)
    sinks: list[RecordSink] = [metrics, ledger, *([AccessLog()] if config.ingress.access_log else []), *more_sinks]
    everywhere = Everywhere(requests, ledger, ask)
    console = Console(config, dispatcher, metrics, ledger, keys, ask_all)
    shortener = Shortener(renderer, Completion(renderer, pools, dispatcher))
    preparation = Preparation(renderer, keys, shortener)

    def generation(route: Route) -> Generation:
        return Generation(
            route, config, pools, dispatcher, tracing, metrics, sinks, readers, keys, preparation, requests
        )

    async def list_models(request: Request) -> Response:
        keys.identify(request.headers.get("authorization"))
        return _json(200, await renderer.models())

    async def show_model(request: Request) -> Response:
        keys.identify(request.headers.get("authorization"))
        wanted = request.path_params["model"]
        for card in (await renderer.models())["data"]:
            if card["id"] == wanted:
                return _json(200, card)
        raise NotFound(f"The model `{wanted[:128]}` does not exist.", param="model")

    async def live(request: Request) -> Response:
        return _json(200, {"status": "ok"})

    async def ready(request: Request) -> Response:
        # Serve learns of a death seconds later than whoever waited for an answer.
        states = {
            name: {"replicas": state.replicas, "healthy": min(state.healthy, dispatcher.fleet.answering(name))}
            for name, state in (await health.pools()).items()
        }
        is_ready = all(state["healthy"] > 0 for state in states.values())
        body = {"ready": is_ready, "http": http_path(), "pools": states}
        return _json(200 if is_ready else 503, body)

    async def cancel(request: Request) -> Response:
        caller = keys.identify(request.headers.get("authorization"))
        request_id = clean_request_id(request.path_params["id"])
        if not await everywhere.cancel(request_id, caller.name):
            raise NotFound(f"There is no request `{request_id}` in hand.", param="id")
        return _json(200, {"id": request_id, "object": "request", "status": "cancelled"})

    async def show_request(request: Request) -> Response:
        caller = keys.identify(request.headers.get("authorization"))
        return _json(200, await everywhere.describe(clean_request_id(request.path_params["id"]), caller.name))

    async def resume(request: Request) -> Response:
        caller = keys.identify(request.headers.get("authorization"))
        request_id = clean_request_id(request.path_params["id"])
        last = request.headers.get("last-event-id", "0")
        if not last.isdecimal():
            raise InvalidRequest("Last-Event-ID must be the id of an event of this stream.")
        first = await everywhere.after(request_id, caller.name, int(last))

        async def rest() -> AsyncIterator[bytes]:
            excerpt = first
            yield excerpt.events
            while not excerpt.is_over:
                excerpt = await everywhere.after(request_id, caller.name, excerpt.last)
                yield excerpt.events

        headers = {"cache-control": "no-cache", **_id_header(request)}
        return StreamingResponse(rest(), headers=headers, media_type="text/event-stream")

    generations = {"/v1/chat/completions": generation("chat"), "/v1/completions": generation("completions")}
    rest = Starlette(
        routes=[
            *(HttpRoute(path, app, methods=["POST"]) for path, app in generations.items()),
            HttpRoute("/v1/models", list_models, methods=["GET"]),
            HttpRoute("/v1/models/{model:path}", show_model, methods=["GET"]),
            HttpRoute("/v1/requests/{id}", show_request, methods=["GET"]),
            HttpRoute("/v1/requests/{id}/cancel", cancel, methods=["POST"]),
            HttpRoute("/v1/requests/{id}/events", resume, methods=["GET"]),
            *(console.routes() if config.ingress.console else ()),
            HttpRoute("/health", live, methods=["GET"]),
            HttpRoute("/ready", ready, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error, RequestError: _request_error, Exception: _any_error},
    )

    return IngressApp(generations, rest, dispatcher, requests, everywhere, console)


def _json(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump_json(body), status, headers, media_type="application/json")


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error.status, error.body(), _id_header(request))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:128]
    told: RequestError
    if error.status_code == 404:
        told = NotFound(f"There is no route `{path}`.")
    elif error.status_code == 405:
        told = MethodNotAllowed(f"`{path}` does not answer to {request.method}.")
    else:
        told = InvalidRequest(error.detail)
    return _json(told.status, told.body(), {**(error.headers or {}), **_id_header(request)})


async def _any_error(request: Request, error: Exception) -> Response:
    told = InternalError("The server failed to handle the request.")
    return _json(told.status, told.body(), _id_header(request))


def _id_header(request: Request) -> dict[str, str]:
    given = Headers(scope=request.scope).get("x-request-id")
    cleaned = clean_request_id(given)
    return {} if cleaned == given else {"x-request-id": cleaned}
