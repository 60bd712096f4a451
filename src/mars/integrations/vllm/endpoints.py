"""``/v1/dial`` on vLLM's own server, as on ours: show the dial and the counts, or set the dial."""

import sys
from typing import Any

from mars.errors import MarsError
from mars.integrations.vllm import hooks
from mars.integrations.vllm.hooks import Method
from mars.integrations.vllm.options import parse_dial

SERVERS = ("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server", "__main__")
"""Modules that build the app: the newest version's, an older one's, and that one's if it is run as a program"""


def install() -> None:
    """Add the endpoint to the server of this process, if it is one."""
    found = (sys.modules.get(name) for name in SERVERS)
    reason = "vLLM's server has no other place for another endpoint"
    hooks.install((each, "build_app", _build_app, reason) for each in found if hasattr(each, "build_app"))


def _build_app(original: Method, *args: Any, **kwargs: Any) -> Any:
    app = original(*args, **kwargs)
    app.include_router(_router())
    return app


def _router() -> Any:
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse

    async def show(request: Request) -> dict[str, Any]:
        states = await request.app.state.engine_client.collective_rpc("mars_state")
        return summary([state for state in states if state])

    async def turn(request: Request) -> Any:
        try:
            body = await request.json()
            dial = str(parse_dial(body["dial"]))
        except (ValueError, KeyError, TypeError, MarsError) as error:
            message = str(error) if isinstance(error, MarsError) else 'send {"dial": "relaxed=0.3"} or another dial'
            problem = {"message": message, "type": "invalid_request_error", "param": "dial", "code": None}
            return JSONResponse({"error": problem}, 400)
        await request.app.state.engine_client.collective_rpc("mars_turn", args=(dial,))
        return await show(request)

    router = APIRouter()
    router.add_api_route("/v1/dial", show, methods=["GET"], response_model=None)
    router.add_api_route("/v1/dial", turn, methods=["PUT"], response_model=None)
    return router


def summary(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state that the ranks report; each of them sees all requests."""
    state = states[0]
    return {
        "dial": state["dial"],
        "floor": None,
        "tokens_per_forward": state["tokens"] / state["forwards"] if state["forwards"] else None,
        "agreement": 1 - (state["accepted"] - state["agreed"]) / state["tokens"] if state["tokens"] else None,
        **{name: state[name] for name in ("forwards", "tokens", "drafts", "accepted")},
    }
