"""Requests made up from the server's own OpenAPI document, good ones and bad: none of them breaks it.

For every operation schemathesis lists the corner cases, about a thousand in all, and draws as many more at random as
``MARS_SCHEMA_CASES`` says, if there are so many different ones: 200 make some 2,000 cases.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.engine import events, from_schema  # noqa: E402

from tests.serving.conftest import MODEL  # noqa: E402

CASES = int(os.environ.get("MARS_SCHEMA_CASES", "20"))
DIALS = ("one-token", "exact", "relaxed=0.3", "threshold=0.5")
SHAPE = {"message", "type", "param", "code"}
"""Of OpenAI's errors"""
LONG = range(5, 2**31)
"""Lengths of answers that would only take time; what is longer still is not meant as such"""


@pytest.fixture
def api(server: str, http: httpx.Client) -> Iterator[Any]:
    """The document; afterwards the dial is as it was."""
    dial = http.get("/v1/dial").json()["dial"]
    api = schemathesis.openapi.from_url(f"{server}/openapi.json")
    api.config.generation.update(max_examples=CASES, deterministic=True)
    api.config.phases.update(phases=["coverage", "fuzzing"])
    api.config.checks.update(included_check_names=["not_a_server_error"])
    api.config.output.sanitization.update(enabled=False)
    api.config.update(request_timeout=60)
    schemathesis.hook("before_call")(aim)
    yield api
    schemathesis.hooks.unregister(aim)
    assert http.put("/v1/dial", json={"dial": dial}).json()["dial"] == dial


def aim(context: Any, case: Any, kwargs: Any) -> None:
    """Have random requests get past the door, by what the document cannot say."""
    body = case.body
    if not isinstance(body, dict):
        return
    if "completions" in case.path and isinstance(body.get("model"), str):
        body["model"] = MODEL
        if body.get("max_tokens") is body.get("max_completion_tokens") is None:
            body["max_tokens"] = 4
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(name), int) and body[name] in LONG:
            body[name] = 4
    if is_valid(case):
        fit(body)


def fit(body: dict[str, Any]) -> None:
    """What belongs together is there, and some random texts and numbers are dials and tokens."""
    if body.get("max_completion_tokens"):
        body.pop("max_tokens", None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("stream_options"):
        body["stream"] = True
    if body.get("prompt") is not None and body.get("messages") is not None:
        del body["messages"]
    if body.get("messages") and not any(message.get("content") for message in body["messages"]):
        body["messages"][0]["content"] = "abc"
    if isinstance(dial := body.get("dial"), str):
        body["dial"] = (*DIALS, dial)[len(dial) % 5]
    if isinstance(bias := body.get("logit_bias"), dict):
        body["logit_bias"] = {str(token): value for token, value in enumerate(bias.values())}
    for name in {"prompt", "tokens"} & body.keys():
        body[name] = known(body[name])


def known(prompt: Any) -> Any:
    """The same in tokens that the model has, except for very large ones."""
    if isinstance(prompt, list):
        return [known(each) for each in prompt]
    if isinstance(prompt, str):
        return prompt or "abc"
    return prompt % 10 if isinstance(prompt, int) and abs(prompt) < 2**31 else prompt


def is_valid(case: Any) -> bool:
    """Does the case keep to the document?"""
    return case.meta is not None and case.meta.generation.mode == GenerationMode.POSITIVE


def test_no_request_breaks_the_server(api: Any, http: httpx.Client) -> None:
    seen: Counter[tuple[str, str, int]] = Counter()
    wrong: list[str] = []

    @api.hook
    def after_call(context: Any, case: Any, response: Any) -> None:
        seen[case.operation.label, "valid" if is_valid(case) else "invalid", response.status_code] += 1
        if response.status_code >= 400 and set(json.loads(response.content)["error"]) != SHAPE:
            wrong.append(f"{case.operation.label}: {response.text}")

    for event in from_schema(api).execute():
        if isinstance(event, events.NonFatalError):
            wrong.append(f"{event.label}: {event.value!r}")
        if isinstance(event, events.ScenarioFinished):
            for checks in event.recorder.checks.values():
                wrong += [
                    f"{each.failure_info.failure.title}: {each.failure_info.code_sample}"
                    for each in checks
                    if each.failure_info
                ]
    print(f"{seen.total()} cases")
    for (operation, kind, status), count in sorted(seen.items()):
        print(f"{operation:26} {kind:8} {status} {count:5}")
    assert not wrong, "\n".join([f"{len(wrong)} went wrong, the shortest:", *sorted(wrong, key=len)[:3]])
    for operation in {operation for operation, _, _ in seen}:
        assert seen[operation, "valid", 200], f"no {operation} went well: a weak test"
    assert http.get("/health").status_code == 200


CHAT = f'{{"model": "{MODEL}", "max_tokens": 4, "messages": [{{"role": "assistant", %s}}]}}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", r'{"model": "\ud800", "prompt": "abc"}'),
        ("/v1/completions", rf'{{"model": "{MODEL}", "prompt": "\ud800"}}'),
        ("/v1/chat/completions", CHAT % r'"content": "\ud800"'),
        ("/tokenize", r'{"prompt": "\ud800"}'),
        ("/v1/completions", "[" * 10**5),
        ("/v1/chat/completions", CHAT % '"tool_calls": [{"id": "", "function": {"name": "f", "arguments": [null]}}]'),
        (
            "/v1/chat/completions",
            CHAT % ('"tool_calls": [{"id": "", "function": {"name": "f", "arguments": "%s"}}]' % ("[" * 10**5)),
        ),
    ],
    ids=["model", "prompt", "content", "tokenize", "deep", "arguments", "deep arguments"],
)
def test_what_the_document_does_not_know(http: httpx.Client, path: str, body: str) -> None:
    """Halves of characters, which JSON can write and text cannot hold, and lists without an end."""
    response = http.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    assert set(response.json()["error"]) == SHAPE
