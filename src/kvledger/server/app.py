"""The routes. `make_app` gives an ASGI application over a `ServerState`; who runs it and where is not known here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp

from kvledger import __version__
from kvledger.errors import BadRequest, KvledgerError
from kvledger.server import generate, prompts, responses_api
from kvledger.server.access import AccessLog
from kvledger.server.auth import Guard
from kvledger.server.errors import NO_RETRY, RETRY_AFTER_S, ErrorReply, reply_for
from kvledger.server.prometheus import CONTENT_TYPE
from kvledger.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest, parse
from kvledger.server.responses import model_list
from kvledger.server.sse import ClientGone
from kvledger.server.state import ServerState

Handler = Callable[[Request, ServerState], Awaitable[Response]]


async def models(http: Request, state: ServerState) -> Response:
    """`GET /v1/models`."""
    served = state.served
    return JSONResponse(model_list(served.names, state.created, served.max_model_len))


async def model(http: Request, state: ServerState) -> Response:
    """`GET /v1/models/{name}`."""
    served, name = state.served, http.path_params["name"]
    prompts.check_model(name, served)
    return JSONResponse(model_list([name], state.created, served.max_model_len)["data"][0])


async def tokenize(http: Request, state: ServerState) -> Response:
    """`POST /tokenize`: of a prompt, or of chat messages through the template."""
    served, body = state.served, parse(TokenizeRequest, await http.body())
    prompts.check_model(body.model, served)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("give either prompt or messages", "prompt")
    if body.messages is not None:
        chat = ChatRequest(messages=body.messages, add_generation_prompt=body.add_generation_prompt)
        ids = prompts.chat_prompt(chat, None, served)
    else:
        ids = served.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens)
    strings = [served.token_text(token_id)[0] for token_id in ids] if body.return_token_strs else None
    limit = served.max_model_len
    return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


async def detokenize(http: Request, state: ServerState) -> Response:
    """`POST /detokenize`."""
    served, body = state.served, parse(DetokenizeRequest, await http.body())
    prompts.check_model(body.model, served)
    prompts.check_ids(body.tokens, served.vocab_size, "tokens")
    return JSONResponse({"prompt": served.tokenizer.decode(body.tokens, skip_special=False)})


async def health(http: Request, state: ServerState) -> Response:
    """`GET /health`: 200 and nothing, or 503 and the reason. Never waits for the engine."""
    if state.is_healthy:
        return Response(status_code=200)
    retry = {"Retry-After": str(RETRY_AFTER_S)} if state.link.state.value == "loading" else NO_RETRY
    reason = f"{state.link.state.value}: {state.link.reason}"
    return JSONResponse(ErrorReply(503, "ServiceUnavailableError", reason).body(), 503, headers=retry)


async def version(http: Request, state: ServerState) -> Response:
    """`GET /version`."""
    return JSONResponse({"version": __version__})


async def load(http: Request, state: ServerState) -> Response:
    """`GET /load`: generation requests that are being served."""
    return JSONResponse({"server_load": state.link.num_open})


async def metrics(http: Request, state: ServerState) -> Response:
    """`GET /metrics`, in Prometheus' text format; empty until the model is known."""
    found = state.metrics
    if found is None:
        return Response(b"", media_type=CONTENT_TYPE)
    return Response(found.render(), media_type=CONTENT_TYPE)


async def ledger(http: Request, state: ServerState) -> Response:
    """`GET /ledger`: the live books, asked for in the engine's own thread between two steps."""
    return JSONResponse(await state.link.call(state.served.books))


async def page(http: Request, state: ServerState) -> Response:
    """`GET /`: the page, which uses nothing but this API."""
    return HTMLResponse(files("kvledger.server").joinpath("page.html").read_text("utf-8"))


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", generate.chat),
    ("POST", "/v1/completions", generate.completion),
    ("POST", "/v1/responses", responses_api.create),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/ping", health),
    ("GET", "/version", version),
    ("GET", "/load", load),
    ("GET", "/metrics", metrics),
    ("GET", "/ledger", ledger),
    ("GET", "/", page),
)


def make_app(state: ServerState) -> ASGIApp:
    """The application with its guards. The engine starts to load when the application starts up."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.link.start()
        yield
        state.link.stop()

    app = FastAPI(title="kvledger", version=__version__, lifespan=lifespan, openapi_url=None)
    for method, path, handler in ROUTES:
        app.add_api_route(path, _bind(handler, state), methods=[method], response_model=None)
    app.add_exception_handler(KvledgerError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_error)
    settings = state.settings
    guarded: ASGIApp = Guard(app, settings.api_keys, settings.max_body_bytes)
    if settings.allow_origins:
        guarded = _with_cors(guarded, settings.allow_origins)
    return AccessLog(guarded, state, frozenset(path for _, path, _ in ROUTES))


def _bind(handler: Handler, state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(http: Request) -> Response:
        return await handler(http, state)

    return endpoint


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(app, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])


async def _on_error(http: Request, error: Exception) -> Response:
    reply = reply_for(error)
    return JSONResponse(reply.body(), reply.status, headers=dict(reply.headers))


async def _on_http_error(http: Request, error: Any) -> Response:
    """Unknown route, wrong method."""
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    message = f"{http.method} {http.url.path}: {error.detail}"
    return JSONResponse(ErrorReply(error.status_code, kind, message).body(), error.status_code, headers=error.headers)


async def _on_client_gone(http: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the log, as nginx has it."""
    return Response(status_code=499)
