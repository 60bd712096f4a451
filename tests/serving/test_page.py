"""The page at ``/`` in a real browser: it streams, turns the dial, colours forwards, races, says what went wrong."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.serving.conftest import MODEL, crowd, kill_engine, number, serving, until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

LONG, SHORT = "cae", "cab"
"""What the tiny model answers until it is cut off, and what in some twenty tokens"""
LOOSE = "threshold=0.2"
"""Believes so much that most forwards write several tokens"""
STOPS = 10
THUMB = 24


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=10_000)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, expected: str = "$^") -> Iterator[Page]:
    """The page in a window of its own. It may log nothing but what is ``expected``, and ask nobody but its server."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    logged: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: logged.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    try:
        yield page
    finally:
        context.close()
    assert [each for each in logged if not re.search(expected, each)] == []
    assert [each for each in asked if not each.startswith((f"{address}/", "data:"))] == []
    assert f"{address}/v1/dial" in asked, "the page did nothing: a weak test"


@pytest.fixture
def page(browser: Browser, server: str, http: httpx.Client) -> Iterator[Page]:
    try:
        with opened(browser, server) as page:
            expect(page.locator("#slider")).to_be_enabled()
            yield page
    finally:
        http.put("/v1/dial", json={"dial": "exact"})


def send(page: Page, question: str, button: str = "#send") -> None:
    page.fill("#question", question)
    page.click(button)


def idle(page: Page) -> None:
    """Wait until the answer is there."""
    expect(page.locator("#send")).to_be_visible(timeout=30_000)


def figures(page: Page, name: str) -> list[str]:
    return page.locator(f"[data-figure={name}]").all_inner_texts()


def is_at_end(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollHeight - innerHeight - scrollY < 2")


def overhang(page: Page) -> int:
    """How many pixels can only be seen by scrolling sideways."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def dial_of(http: httpx.Client) -> str:
    return str(http.get("/v1/dial").json()["dial"])


def turn(page: Page, http: httpx.Client, dial: str) -> None:
    http.put("/v1/dial", json={"dial": dial})
    page.reload()
    expect(page.locator("#dial-name")).to_have_text(dial)


def cut_off(page: Page, tokens: int) -> None:
    """Have shorter answers, by the page's settings."""
    page.click("[popovertarget=settings]")
    page.fill("#max-tokens", str(tokens))
    page.keyboard.press("Escape")


def chat(question: str, **options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 512, **options}


# --- the chat


def test_an_answer_streams_in(page: Page, http: httpx.Client) -> None:
    expect(page.locator("#model")).to_have_text(MODEL)
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => {
            const answer = document.querySelector(".answer");
            const { length } = answer.querySelector(".text").textContent;
            seen.push({ at: performance.now(), length, busy: answer.ariaBusy });
        }).observe(document.getElementById("log"), { subtree: true, childList: true });
    }""")
    cut_off(page, 120)
    send(page, LONG)
    idle(page)
    whole = http.post("/v1/chat/completions", json=chat(LONG, max_tokens=120)).json()["choices"][0]["message"][
        "content"
    ]
    expect(page.locator(".question")).to_have_text(LONG)
    expect(page.locator(".answer .text")).to_have_text(whole)
    seen = [each for each in page.evaluate("seen") if each["busy"] == "true" and 0 < each["length"] < len(whole)]
    assert len({each["length"] for each in seen}) > 1
    assert seen[-1]["at"] - seen[0]["at"] > 10, "milliseconds: the text came all at once"


def test_a_chat_goes_on_and_starts_anew(page: Page) -> None:
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#question", SHORT)
    page.press("#question", "Enter")
    idle(page)
    first = page.inner_text(".text")
    send(page, "abc")
    idle(page)
    page.click("#new-chat")
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "de")
    idle(page)
    said = [[each["content"] for each in body["messages"]] for body in bodies]
    assert first and said == [[SHORT], [SHORT, first, "abc"], ["de"]]


def test_an_answer_can_be_stopped(page: Page, server: str) -> None:
    page.evaluate("""new MutationObserver(() => {
        if (document.querySelector(".text").textContent.length > 5) document.getElementById("stop").click();
    }).observe(document.getElementById("log"), { subtree: true, childList: true })""")
    send(page, LONG)
    expect(page.locator(".answer .trouble")).to_have_text("Stopped.")
    idle(page)
    assert 5 < len(page.inner_text(".text")) < 200
    until(lambda: number(server, "num_requests_running") == 0)


def test_the_figures(page: Page, http: httpx.Client) -> None:
    send(page, SHORT)
    idle(page)
    assert figures(page, "agreement") == ["100%"]
    assert float(figures(page, "rate")[0]) > 0
    turn(page, http, LOOSE)
    send(page, SHORT)
    idle(page)
    expected = http.post("/v1/chat/completions", json=chat(SHORT)).json()["mars"]
    assert expected["tokens_per_forward"] > 2 and expected["agreement"] < 0.5
    assert figures(page, "perForward") == [f"{expected['tokens_per_forward']:.2f}"]
    assert figures(page, "forwards") == [str(expected["forwards"])]
    assert float(figures(page, "agreement")[0].rstrip("%")) == pytest.approx(100 * expected["agreement"], abs=0.1)


# --- the dial


def test_the_slider_turns_the_servers_dial(page: Page, http: httpx.Client) -> None:
    expect(page.locator("#dial-name")).to_have_text("exact")
    box = page.locator("#slider").bounding_box()
    assert box is not None
    step, middle = (box["width"] - THUMB) / (STOPS - 1), box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + THUMB / 2 + step, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + THUMB / 2 + 4 * step, middle, steps=4)
    page.mouse.up()
    expect(page.locator("#dial-name")).to_have_text("relaxed=0.3")
    expect(page.locator("#dial-meaning")).to_contain_text("at least 30% as likely")
    until(lambda: dial_of(http) == "relaxed=0.3")
    page.focus("#slider")
    page.keyboard.press("Home")
    until(lambda: dial_of(http) == "one-token")


def test_the_slider_turns_an_answer_under_way(page: Page, server: str, http: httpx.Client) -> None:
    page.fill("#question", SHORT)
    with crowd(server, 4, 4):
        page.click("#send")
        page.focus("#slider")
        page.keyboard.press("ArrowLeft")
        until(lambda: dial_of(http) == "one-token")
    idle(page)
    expect(page.locator(".dial-used")).to_have_text("exact, then one-token")


def test_the_page_follows_when_somebody_else_turns_the_dial(page: Page, http: httpx.Client) -> None:
    http.put("/v1/dial", json={"dial": "threshold=0.9"})
    expect(page.locator("#dial-name")).to_have_text("threshold=0.9")
    expect(page.locator("#slider")).to_have_value("7")
    expect(page.locator("#dial-meaning")).to_contain_text("at least 90% sure")


def test_dials_that_are_not_on_the_slider(page: Page, http: httpx.Client) -> None:
    for dial, stop, meaning in (
        ("threshold:entropy=0.87", 7, "at least 87% sure"),
        ("relaxed=0.004", 5, "at least 0.4% as likely"),
        ("threshold=0.0", 9, "at least 0% sure"),
    ):
        turn(page, http, dial)
        expect(page.locator("#slider")).to_have_value(str(stop))
        expect(page.locator("#dial-meaning")).to_contain_text(meaning)
        send(page, "abc", "#race")
        idle(page)
        assert page.locator(".dial-used").all_inner_texts() == ["one-token", dial]
        assert page.locator(".trouble:visible").all_inner_texts() == [] and dial_of(http) == dial


# --- forwards in colour, and the race


def test_forwards_in_colour(page: Page, http: httpx.Client) -> None:
    turn(page, http, LOOSE)
    send(page, SHORT)
    idle(page)

    def styles() -> list[list[str]]:
        return page.locator(".text span").evaluate_all("""all => all.map((each) => {
            const { backgroundColor, borderBottomWidth } = getComputedStyle(each);
            return [backgroundColor, borderBottomWidth, each.title];
        })""")

    plain = styles()
    assert plain and all(each == ["rgba(0, 0, 0, 0)", "0px", ""] for each in plain)
    page.check("#show-forwards")
    shown = styles()
    assert len({colour for colour, *_ in shown}) == 4 and all(one[0] != other[0] for one, other in pairwise(shown))
    tokens = [int(width.removesuffix("px")) for _, width, _ in shown]
    assert max(tokens) > 1, "one token per forward: a weak test"
    said = [f"Forward {index}: {count} token{'s' if count > 1 else ''}" for index, count in enumerate(tokens, 1)]
    assert [title for *_, title in shown] == said
    expect(page.locator("#legend")).to_be_visible()
    page.uncheck("#show-forwards")
    assert styles() == plain
    expect(page.locator("#legend")).to_be_hidden()


def test_a_race(page: Page, http: httpx.Client) -> None:
    def race(question: str) -> list[str]:
        send(page, question, "#race")
        idle(page)
        return page.locator(".answer .text").all_inner_texts()

    one, other = race(SHORT)
    left, right = (each.bounding_box() for each in page.locator(".answer").all())
    assert left and right and left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "not side by side"
    assert page.locator(".dial-used").all_inner_texts() == ["one-token", "exact"]
    assert one == other != ""
    expect(page.locator(".verdict")).to_have_text(re.compile(r"(faster|slower|Equally fast), same text$"))
    turn(page, http, LOOSE)
    one, other = race(SHORT)
    plain, loose = map(int, figures(page, "forwards"))
    assert one and other and one != other and plain > loose
    expect(page.locator(".verdict")).to_contain_text(", but the texts differ from the 1st word on")


def test_a_race_needs_two_dials(page: Page, http: httpx.Client) -> None:
    turn(page, http, "one-token")
    send(page, SHORT, "#race")
    expect(page.locator("#composer-note")).to_contain_text("one-token would race against itself")
    expect(page.locator(".turn")).to_have_count(0)


# --- what it looks like


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert overhang(page) == 0
    cut_off(page, 60)
    send(page, LONG, "#race")
    idle(page)
    page.check("#show-forwards")
    until(lambda: is_at_end(page))
    assert overhang(page) == 0
    one, other = (each.bounding_box() for each in page.locator(".race .answer").all())
    assert one and other and (one["y"] == other["y"]) == (width > 768), "side by side, or on a phone in a column"
    page.click("[popovertarget=settings]")
    expect(page.locator("#settings")).to_be_in_viewport(ratio=1)
    assert overhang(page) == 0


def test_light_and_dark(page: Page) -> None:
    def colours(scheme: str) -> list[list[int]]:
        page.emulate_media(color_scheme=scheme)
        style = page.evaluate("[getComputedStyle(document.body)].flatMap(each => [each.backgroundColor, each.color])")
        return [[int(each) for each in re.findall(r"\d+", colour)] for colour in style]

    paper, ink = colours("light")
    assert min(paper) > 200 and max(ink) < 60
    paper, ink = colours("dark")
    assert max(paper) < 60 and min(ink) > 200


# --- what goes wrong


def test_a_busy_server(browser: Browser, server: str) -> None:
    with opened(browser, server, "429") as page:

        def is_refused() -> bool:
            page.click("#new-chat")
            page.fill("#question", SHORT)
            with crowd(server, 4, 8):
                page.click("#send")
                idle(page)
            return page.locator(".answer .trouble").is_visible()

        until(is_refused)
        expect(page.locator(".answer .trouble")).to_have_text("The server is busy. Please try again in 1 second.")
        page.click(".again")
        idle(page)
        expect(page.locator(".answer .trouble")).to_be_hidden()
        assert page.inner_text(".answer .text")


def test_a_prompt_that_is_too_long(browser: Browser, server: str) -> None:
    with opened(browser, server, "400") as page:
        page.set_viewport_size({"width": 390, "height": 600})
        send(page, "abc" * 200)
        expect(page.locator(".answer .trouble")).to_contain_text("The server refused: ")
        expect(page.locator(".answer .trouble")).to_contain_text("shorten the prompt")
        expect(page.locator(".figures")).to_be_hidden()
        expect(page.locator(".again")).to_be_visible()
        until(lambda: is_at_end(page))
        assert overhang(page) == 0


def test_keys_a_floor_a_limit_and_a_lost_engine(browser: Browser, letters: Path) -> None:
    options = ("--api-key", "use", "--admin-key", "run", "--floor", "relaxed=0.5", "--max-new-tokens", 30)
    with (
        serving(*options, model=letters) as address,
        httpx.Client(base_url=address, headers={"Authorization": "Bearer run"}) as http,
        opened(browser, address, "400|401|503") as page,
    ):

        def give(key: str) -> None:
            page.fill("#key", key)
            page.click("text=Use this key")

        expect(page.locator("#key-hint")).to_have_text("It is forgotten when you close this tab.")
        page.click("text=Cancel")
        expect(page.locator("#model")).to_have_text("A key is needed for this.")
        send(page, LONG)
        give("wrong")
        expect(page.locator("#key-hint")).to_contain_text("Your key was not accepted")
        give("use")
        idle(page)
        assert len(page.inner_text(".answer .text")) == 30, "the server's limit, which is below the page's"
        expect(page.locator(".dial-used")).to_have_text("exact")
        expect(page.locator("#model")).to_have_text(MODEL)
        expect(page.locator("#dial-limit")).to_have_text("The operator allows nothing looser than relaxed=0.5.")

        page.focus("#slider")
        page.keyboard.press("End")
        expect(page.locator("#dial-name")).to_have_text("relaxed=0.5")
        page.click("text=Cancel")
        expect(page.locator("#dial-trouble")).to_have_text("A key is needed for this.")
        expect(page.locator("#dial-name")).to_have_text("exact")
        page.focus("#slider")
        page.keyboard.press("End")
        give("run")
        until(lambda: dial_of(http) == "relaxed=0.5")
        expect(page.locator("#dial-trouble")).to_be_hidden()

        kill_engine(address)
        until(lambda: http.get("/health").status_code == 503)
        page.click("#new-chat")
        send(page, SHORT)
        expect(page.locator(".answer .trouble")).to_have_text(re.compile("The server has a problem: .*try again"))
        expect(page.locator(".again")).to_be_visible()
