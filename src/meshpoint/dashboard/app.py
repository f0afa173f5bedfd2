"""The pages of the dashboard, and their addresses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pydantic import JsonValue
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from meshpoint import interventions
from meshpoint._version import __version__
from meshpoint.dashboard import actions, answer_form, views
from meshpoint.dashboard.access import SESSION_COOKIE, SESSION_SECONDS, Access, User
from meshpoint.dashboard.guard import TOKEN_FIELD, Guard
from meshpoint.dashboard.live import EventStream, Live
from meshpoint.dashboard.showing import Masks, make_environment
from meshpoint.dashboard.sources import Source, load_sources
from meshpoint.errors import (
    AnswerRefused,
    ConfigurationError,
    MeshpointError,
    OperationNotFound,
    QuestionNotOpen,
    Unavailable,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.secrets import remove_secrets

log = logging.getLogger(__name__)

_STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, slots=True)
class _View:
    title: str
    load: Callable[[Source, views.Query], Awaitable[views.Context]]
    in_menu: bool = True
    is_live: bool = True


_VIEWS: Mapping[str, _View] = {
    "waiting": _View("Waiting", views.waiting),
    "questions": _View("Waiting on you", views.questions),
    "failures": _View("Failed and dead", views.failures),
    "agents": _View("Agents and replicas", views.agents),
    "audit": _View("Audit", views.audit),
    "tasks": _View("Tasks", views.tasks, in_menu=False),
    "task": _View("Task", views.task, in_menu=False),
    "letters": _View("Dead letters", views.letters, in_menu=False, is_live=False),
    "letter": _View("Dead letter", views.letter, in_menu=False, is_live=False),
}


class Dashboard:
    """The operators' dashboard, as an ASGI application.

        app.mount("/mesh", Dashboard("travel.yaml", access=TokenAccess.from_file("tokens")))

    It opens each database when a page first needs it. An application that mounts it calls `aclose`
    at its end; a server that runs it alone does so by the lifespan protocol.

    Args:
        configs: The YAML file of each mesh.
        access: Who may view and who may change something.
        hosts: Names by which browsers reach it, besides localhost and IP addresses.
        secure: Whether browsers reach it by HTTPS. Cookies are then sent by HTTPS only.
        trace_url: Address of a trace, with {trace_id} in it.

    Raises:
        ConfigurationError: A configuration cannot work, or names no database.
    """

    def __init__(
        self,
        *configs: Path | str,
        access: Access,
        hosts: Collection[str] = (),
        secure: bool = False,
        trace_url: str | None = None,
    ) -> None:
        if trace_url is not None and not (
            trace_url.startswith(("https://", "http://")) and "{trace_id}" in trace_url
        ):
            fix = "write https://traces.example.com/trace/{trace_id}"
            raise ConfigurationError("trace_url", "is not the address of a trace", fix)
        self._sources = {source.key: source for source in load_sources(configs)}
        self._access, self._secure, self._trace_url = access, secure, trace_url
        self._environment = make_environment()
        self._live = Live()
        self._guard = Guard(self._make_app(), access, hosts, secure=secure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        await self._guard(scope, receive, send)

    async def aclose(self) -> None:
        """Close all databases. A later request opens them again."""
        for source in self._sources.values():
            await source.close()

    def _make_app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self.aclose()

        return Starlette(
            routes=[
                Route("/", self._home),
                Route("/healthz", self._health),
                Route("/login", self._login, methods=["GET", "POST"]),
                Route("/logout", self._logout, methods=["POST"]),
                Route("/find", self._find),
                Mount("/static", StaticFiles(directory=_STATIC)),
                Route("/m/{source}/question", self._question, methods=["GET", "POST"]),
                Route("/m/{source}/do/{action}", self._act, methods=["GET", "POST"]),
                Route("/m/{source}/live/{view}", self._follow),
                Route("/m/{source}/{view}", self._show),
            ],
            exception_handlers={
                MeshpointError: self._show_error,  # type: ignore[dict-item]  # of a subclass
                404: self._show_missing,
            },
            lifespan=lifespan,
        )

    async def _home(self, request: Request) -> Response:
        return _redirect(request, f"/m/{next(iter(self._sources))}/waiting")

    async def _health(self, request: Request) -> Response:
        """Whether all databases answer. The body has no details, since it needs no login."""
        for source in self._sources.values():
            try:
                await (await source.open()).agents()
            except MeshpointError as error:
                log.warning("%s: %s", source.title, error)
                return PlainTextResponse("unavailable\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse("ok\n")

    async def _find(self, request: Request) -> Response:
        """Find the database that has a task, and go to its page."""
        task_id = request.query_params.get("id", "").strip()
        unavailable: Unavailable | None = None
        for source in self._sources.values():
            try:
                if task_id and await (await source.open()).task(TaskId(task_id)):
                    return _redirect(request, f"/m/{source.key}/task", {"id": task_id})
            except Unavailable as error:
                unavailable = error  # another database may have the task
        if unavailable is not None:
            raise unavailable
        raise OperationNotFound(task_id, f"there is no task {task_id[:200]!r} in any database")

    async def _show(self, request: Request) -> Response:
        """Show a page."""
        source, name, view = self._chosen(request)
        content = await self._render(request, source, name, view)
        if request.headers.get("hx-request"):
            return HTMLResponse(content)
        notice = None
        if done := request.query_params.get("done"):
            notice = await (await source.open()).action(done)
        context: dict[str, Any] = {
            "content": content,
            "title": view.title,
            "view": name,
            "source": source,
            "notice": notice,
            "live": self._address(request, f"/m/{source.key}/live/{name}", _query(request))
            if view.is_live
            else None,
        }
        return self._page(request, "page.html", context)

    async def _follow(self, request: Request) -> Response:
        """Send a page whenever it changes."""
        source, name, view = self._chosen(request)
        user: User = request.state.user
        if request.method != "GET" or not view.is_live:
            return PlainTextResponse("no stream", HTTPStatus.METHOD_NOT_ALLOWED)
        if self._live.is_full(user.name):
            return PlainTextResponse("too many streams", HTTPStatus.SERVICE_UNAVAILABLE)

        async def render() -> tuple[str, str]:
            try:
                return await self._render(request, source, name, view), ""
            except OperationNotFound as error:
                return self._problem(str(error)), ""
            except MeshpointError as error:
                return "", self._problem(f"{source.title}: {error}")
            except Exception:
                log.exception("the page %s cannot be rendered", name)
                return "", self._problem("this page cannot be read; the log says why")

        root = request.scope.get("root_path", "")
        key = (source.key, name, root, user.role, tuple(sorted(_query(request).items())))
        return EventStream(
            self._live.stream(key, render, user.name),
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    def _chosen(self, request: Request) -> tuple[Source, str, _View]:
        name = request.path_params["view"]
        view = _VIEWS.get(name)
        if view is None:
            raise OperationNotFound(name, "there is no such page")
        return self._source(request), name, view

    def _source(self, request: Request) -> Source:
        key = request.path_params["source"]
        if key not in self._sources:
            raise OperationNotFound(key, "there is no such database")
        return self._sources[key]

    async def _render(self, request: Request, source: Source, name: str, view: _View) -> str:
        """The content of a page, which is the same for all people with the same role."""
        context = await view.load(source, _query(request))
        return self._template(request, f"{name}.html", {**context, "source": source})

    async def _act(self, request: Request) -> Response:
        """Ask for confirmation of an action, or perform it."""
        source = self._source(request)
        name = request.path_params["action"]
        plan = await actions.plan(source, name, _query(request))
        problem = ""
        if request.method == "POST":
            try:
                done = await actions.perform(
                    source,
                    plan,
                    request.state.user.name,
                    request.state.form.get("choice", [""])[0],
                )
            except Unavailable:
                raise
            except MeshpointError as error:
                problem = str(error)
            else:
                page, query = plan.back
                return _redirect(request, f"/m/{source.key}/{page}", {**query, "done": done})
        context = {"plan": plan, "problem": problem, "source": source, "title": plan.title}
        status = HTTPStatus.CONFLICT if problem else HTTPStatus.OK
        return self._page(request, "confirm.html", context, status)

    async def _question(self, request: Request) -> Response:
        """Show the form of a question, or record its answer."""
        source = self._source(request)
        store = await source.open()
        key = QuestionKey.from_id(request.query_params.get("id", ""))
        (asked,) = await store.find_questions([key])
        if asked is None:
            raise QuestionNotOpen(f"task {key.task_id} no longer asks {key.name!r}")
        schema = _schema(asked)
        form: Mapping[str, list[str]] | None = None
        problem = "" if asked.outcome is None else asked.describe()
        if request.method == "POST":
            form = request.state.form
            try:
                done = await self._answer(source, asked, schema, request.state.user, form)
            except (AnswerRefused, QuestionNotOpen) as error:
                problem = str(error)
            else:
                return _redirect(request, f"/m/{source.key}/questions", {"done": done})
        context = {
            "asked": asked,
            "problem": problem,
            "prompt": Masks(source.secret_keys).text(asked.prompt),
            "input": answer_form.make_input(schema, form),
            "form": form or {},
            "schema": schema,
            "allowed": _allowed(asked),
            "source": source,
            "title": f"Answer {asked.name}",
            "masks": Masks(source.secret_keys),
        }
        status = HTTPStatus.CONFLICT if form is not None else HTTPStatus.OK
        return self._page(request, "question.html", context, status)

    async def _answer(
        self,
        source: Source,
        asked: AskedQuestion,
        schema: Mapping[str, Any],
        user: User,
        form: Mapping[str, list[str]],
    ) -> str:
        """Record the answer, or the rejection, that a form has.

        Raises:
            AnswerRefused, QuestionNotOpen: It does not fit, or comes too late.
        """
        mode = form.get("mode", [""])[0]
        value: JsonValue = None
        rejection: str | None = None
        if mode == "reject":
            rejection = form.get("reason", [""])[0]
        elif mode == "json":
            value = answer_form.read_json(form.get("json", [""])[0])
        else:
            value = answer_form.read_answer(answer_form.make_input(schema), form)
        question_id = asked.key.to_id()

        async def run(_: str | None) -> str:
            store = await source.open()
            found = await store.task(asked.key.task_id)
            if found is None:
                raise QuestionNotOpen(f"task {asked.key.task_id} no longer exists")
            await interventions.answer(
                store, *found, question_id, value, rejection=rejection, by=user.name
            )
            return f"{'answered' if rejection is None else 'rejected'} {asked.name}"

        plan = actions.Plan(
            name="answer" if rejection is None else "reject",
            title="",
            button="",
            target=asked.key.task_id,
            effects=(),
            run=run,
            back=("questions", {}),
            details={
                "question": asked.name,
                "answer": remove_secrets(value, (), source.secret_keys)[0],
                "reason": rejection,
            },
        )
        return await actions.perform(source, plan, user.name)

    async def _login(self, request: Request) -> Response:
        """Ask for a token, or begin a session."""
        if not self._access.has_login:
            return _redirect(request, "/")
        problem = ""
        if request.method == "POST":
            found = self._access.log_in(request.state.form.get("token", [""])[0].strip())
            if found is not None:
                user, session = found
                log.info("%s logged in", user.name)
                return self._begin_session(request, session)
            log.warning("a login failed, from %s", request.client.host if request.client else "-")
            problem = "This is not the token of a user."
        context = {"title": "Log in", "problem": problem, "next": _next_page(request)}
        status = HTTPStatus.FORBIDDEN if problem else HTTPStatus.OK
        return self._page(request, "login.html", context, status)

    def _begin_session(self, request: Request, session: str) -> Response:
        response = RedirectResponse(
            request.scope.get("root_path", "") + _next_page(request), HTTPStatus.SEE_OTHER
        )
        response.set_cookie(
            SESSION_COOKIE,
            session,
            max_age=SESSION_SECONDS,
            path=request.scope.get("root_path", "") or "/",
            secure=self._secure,
            httponly=True,
            samesite="lax",
        )
        return response

    async def _logout(self, request: Request) -> Response:
        response = _redirect(request, "/login")
        response.delete_cookie(SESSION_COOKIE, path=request.scope.get("root_path", "") or "/")
        return response

    async def _show_error(self, request: Request, error: MeshpointError) -> Response:
        match error:
            case Unavailable():
                status = HTTPStatus.SERVICE_UNAVAILABLE
            case ConfigurationError():
                status = HTTPStatus.BAD_REQUEST
            case OperationNotFound() | QuestionNotOpen():
                status = HTTPStatus.NOT_FOUND
            case _:
                status = HTTPStatus.CONFLICT
        if request.headers.get("hx-request"):
            return HTMLResponse(self._problem(str(error)))
        context = {"title": status.phrase, "problem": str(error), "source": None}
        return self._page(request, "error.html", context, status)

    async def _show_missing(self, request: Request, error: Exception) -> Response:
        context = {"title": "Not found", "problem": "There is no such page.", "source": None}
        return self._page(request, "error.html", context, HTTPStatus.NOT_FOUND)

    def _problem(self, text: str) -> str:
        return self._environment.get_template("problem.html").render(problem=text)

    def _page(
        self,
        request: Request,
        template: str,
        context: Mapping[str, Any],
        status: HTTPStatus = HTTPStatus.OK,
    ) -> Response:
        frame = {
            "sources": list(self._sources.values()),
            "menu": [(name, view.title) for name, view in _VIEWS.items() if view.in_menu],
            "view": None,
            "source": None,
            "has_login": self._access.has_login,
            "form_token": request.state.form_token,
            "token_field": TOKEN_FIELD,
            "version": __version__,
            "home": next(iter(self._sources.values())),
        }
        return HTMLResponse(self._template(request, template, {**frame, **context}), status)

    def _template(self, request: Request, name: str, context: Mapping[str, Any]) -> str:
        def address(path: str, **query: object) -> str:
            return self._address(request, path, query)

        return self._environment.get_template(name).render(
            address=address,
            user=request.state.user,
            trace_url=self._trace_url,
            query=_query(request),
            **context,
        )

    def _address(self, request: Request, path: str, query: Mapping[str, object]) -> str:
        """The address of a page, below the place where the dashboard is mounted."""
        given = {key: value for key, value in query.items() if value not in (None, "")}
        suffix = f"?{urlencode(given)}" if given else ""
        return f"{request.scope.get('root_path', '')}{path}{suffix}"


def _redirect(request: Request, path: str, query: Mapping[str, str] | None = None) -> Response:
    suffix = f"?{urlencode(query)}" if query else ""
    root = request.scope.get("root_path", "")
    return RedirectResponse(f"{root}{path}{suffix}", HTTPStatus.SEE_OTHER)


def _query(request: Request) -> dict[str, str]:
    """The query without what only the frame of a page shows."""
    return {key: value for key, value in request.query_params.items() if key != "done"}


def _next_page(request: Request) -> str:
    """The page of the dashboard to show after a login. The query cannot name another site."""
    path = request.query_params.get("next", "/")
    is_own = path.startswith("/") and not path.startswith("//") and path.isprintable()
    return path if is_own and "\\" not in path else "/"


def _schema(asked: AskedQuestion) -> Mapping[str, Any]:
    update = asked.to_update()
    schema = update.get("answerSchema") if isinstance(update, dict) else None
    return schema if isinstance(schema, dict) else {}


def _allowed(asked: AskedQuestion) -> list[str]:
    """The names that may answer it from elsewhere."""
    allowed = asked._parsed().get("allow")
    return [str(each) for each in allowed] if isinstance(allowed, list) else []
