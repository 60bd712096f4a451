"""The page at ``/`` in a real browser: it streams, turns the dial, colours forwards, races, keeps chats, says what went
wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean

import httpx2 as httpx
import pytest

from tests.conftest import save_chat_model
from tests.serving.conftest import MODEL, Address, crowd, kill_engine, number, serving, until

sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

LONG, SHORT = "cae", "de"
"""What the tiny model answers until it is cut off, and what in some forty tokens"""
LOOSE = "threshold=0.2"
"""Believes so much that most forwards write several tokens"""
STOPS = 10
THUMB = 24


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a family that has no compiled step: its answers take long enough to be watched."""
    folder = tmp_path_factory.mktemp("models") / "letters"
    return save_chat_model(folder, trained=True, family="phi3", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(letters: Path) -> Iterator[Address]:
    with serving("--max-waiting", 8, "--rows", 4, model=letters) as address:
        yield address


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
    """Wait until the answer is there, or both of a race and their replay."""
    expect(page.locator("#send")).to_be_visible(timeout=30_000)
    expect(page.locator(".turn [aria-busy=true]")).to_have_count(0, timeout=30_000)


def figures(page: Page, name: str) -> list[str]:
    return page.locator(f".turn [data-figure={name}]").all_inner_texts()


def is_at_end(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollHeight - innerHeight - scrollY < 2")


def overhang(page: Page) -> int:
    """How many pixels can only be seen by scrolling sideways."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def dial_of(http: httpx.Client) -> str:
    return str(http.get("/v1/dial").json()["dial"])


def turn(page: Page, http: httpx.Client, dial: str) -> None:
    """Turn the server's dial, and start a new chat."""
    http.put("/v1/dial", json={"dial": dial})
    page.reload()
    expect(page.locator("#dial-name")).to_have_text(dial)
    page.click("#new-chat")


def kept_turns(page: Page) -> list[dict]:
    """The turns of the newest chat in the history."""
    return json.loads(page.evaluate("localStorage.getItem('mars-chats')"))[0]["turns"]


def show_text(page: Page, *texts: str) -> None:
    """Have the page show an answer of its history, whose forwards wrote 1, 2, … tokens."""
    pieces = [[0.1 * number, text, number] for number, text in enumerate(texts, 1)]
    tokens = sum(range(len(texts) + 1))
    answer = {"dial": "exact", "turned": [], "tokens": tokens, "forwards": len(texts), "agreement": 1, "seconds": 0.1}
    answer |= {"finished": True, "trouble": "", "pieces": pieces}
    chats = [{"id": 1, "turns": [{"prompt": "abc", "model": MODEL, "answers": [answer]}]}]
    page.evaluate("chats => localStorage.setItem('mars-chats', JSON.stringify(chats))", chats)
    page.evaluate("sessionStorage.setItem('mars-open-chat', '1')")
    page.reload()


def fill_settings(page: Page, **values: object) -> None:
    page.click("[popovertarget=settings]")
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))
    page.keyboard.press("Escape")


def cut_off(page: Page, tokens: int) -> None:
    """Have shorter answers, by the page's settings."""
    fill_settings(page, max_tokens=tokens)


def chat(question: str, **options: object) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 512, **options}


# --- the chat


def test_an_answer_streams_in(page: Page, http: httpx.Client) -> None:
    expect(page.locator("#model")).to_have_text(MODEL)
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => {
            const answer = document.querySelector(".turn .answer");
            if (!answer) return;
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
    expect(page.locator(".turn .question")).to_have_text(LONG)
    expect(page.locator(".turn .text")).to_have_text(whole)
    seen = [each for each in page.evaluate("seen") if each["busy"] == "true" and 0 < each["length"] < len(whole)]
    assert len({each["length"] for each in seen}) > 1
    assert seen[-1]["at"] - seen[0]["at"] > 10, "milliseconds: the text came all at once"


def test_a_chat_goes_on_and_starts_anew(page: Page) -> None:
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#question", SHORT)
    page.press("#question", "Enter")
    idle(page)
    first = page.inner_text(".turn .text")
    send(page, "abc")
    idle(page)
    page.click("#new-chat")
    expect(page.locator(".turn")).to_have_count(0)
    send(page, "de")
    idle(page)
    said = [[each["content"] for each in body["messages"]] for body in bodies]
    assert first and said == [[SHORT], [SHORT, first, "abc"], ["de"]]


def test_an_answer_can_be_stopped(page: Page, server: str) -> None:
    fill_settings(page, max_tokens=2000)  # so that it lasts, however slow the browser is
    page.evaluate("""new MutationObserver(() => {
        if (document.querySelector(".turn .text")?.textContent.length > 5) document.getElementById("stop").click();
    }).observe(document.getElementById("log"), { subtree: true, childList: true })""")
    send(page, LONG)
    expect(page.locator(".turn .trouble")).to_have_text("Stopped.")
    idle(page)
    assert 5 < len(page.inner_text(".turn .text")) < 1900
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
    assert expected["tokens_per_forward"] > 2 and expected["agreement"] < 0.6
    assert figures(page, "perForward") == [f"{expected['tokens_per_forward']:.2f}"]
    assert figures(page, "forwards") == [str(expected["forwards"])]
    assert float(figures(page, "agreement")[0].rstrip("%")) == pytest.approx(100 * expected["agreement"], abs=0.1)


def test_the_figures_and_a_histogram_are_live(page: Page, http: httpx.Client) -> None:
    turn(page, http, "threshold=0.5")
    page.evaluate("""() => {
        window.seen = [];
        new MutationObserver(() => {
            const answer = document.querySelector(".turn .answer[aria-busy=true]");
            if (!answer) return;
            const figures = [...answer.querySelectorAll("dd")].map((each) => each.textContent);
            seen.push([...figures, answer.querySelector(".histogram").ariaLabel].join(" | "));
        }).observe(document.getElementById("log"), { subtree: true, childList: true });
    }""")
    send(page, LONG)
    idle(page)
    seen = [each.split(" | ") for each in page.evaluate("seen")]
    for values in zip(*seen, strict=True):
        assert len({*values} - {"–", ""}) > 3, f"not live: {values}"
    [[kept]] = [turn["answers"] for turn in kept_turns(page)]
    sizes = [tokens for _, _, tokens in kept["pieces"]]
    counts = page.locator(".turn .histogram li").evaluate_all("all => all.map((each) => Number(each.dataset.count))")
    assert counts == [sizes.count(tokens) for tokens in range(1, 5)] and counts[0] and sum(counts[1:])
    text, figures = page.locator(".turn .text").bounding_box(), page.locator(".turn .figures").bounding_box()
    assert text and figures and text["x"] + text["width"] <= figures["x"], "not beside the text"
    page.set_viewport_size({"width": 390, "height": 844})
    text, figures = page.locator(".turn .text").bounding_box(), page.locator(".turn .figures").bounding_box()
    assert text and figures and text["y"] + text["height"] <= figures["y"], "not below the text"


def test_an_answer_is_written_again_with_other_settings(page: Page) -> None:
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    send(page, SHORT)
    idle(page)
    fill_settings(page, system="abc", temperature=0.7, seed=5)
    first, others = page.inner_text(".turn .text"), set()
    for _ in range(2):
        page.click(".again")
        idle(page)
        expect(page.locator(".turn")).to_have_count(1)
        others.add(page.inner_text(".turn .text"))
    assert len(others) == 1 and others != {first}, "the seed draws the same text again"
    assert [body.get("seed") for body in bodies] == [None, 5, 5]
    said = [[(each["role"], each["content"]) for each in body["messages"]] for body in bodies]
    assert said == [[("user", SHORT)], *[[("system", "abc"), ("user", SHORT)]] * 2]
    page.reload()
    expect(page.locator("#system")).to_have_value("abc")


def test_only_the_last_answer_can_be_written_again(page: Page) -> None:
    for question in (SHORT, "abc"):
        send(page, question)
        idle(page)
    expect(page.locator(".again").first).to_be_hidden()
    expect(page.locator(".again").last).to_be_visible()


# --- text


MARKDOWN = """\
## A *small* heading
Some **bold** and `x_y_z` and snake_case_name.

1. first
   - inner
2. second

> quoted

| a | b |
|---|---|
| 1 | **2** |

[here](https://example.org/) and [there](javascript:hacked=1)

```python
def f(x):
    return "<b>"
```
end"""


def test_markdown(page: Page) -> None:
    show_text(page, MARKDOWN)
    text = page.locator(".turn .text")
    expect(text.locator("h5")).to_have_text("A small heading")
    assert text.locator("em").all_inner_texts() == ["small"]
    assert text.locator("strong").all_inner_texts() == ["bold", "2"]
    assert text.locator("p code").all_inner_texts() == ["x_y_z"]
    assert text.locator("ol > li > p").all_inner_texts() == ["first", "second"]
    assert text.locator("ol > li > ul > li").all_inner_texts() == ["inner"]
    expect(text.locator("blockquote")).to_have_text("quoted")
    assert text.locator("th").all_inner_texts() == ["a", "b"] and text.locator("td").all_inner_texts() == ["1", "2"]
    links = text.locator("a").evaluate_all("all => all.map(({ href, rel, target }) => [href, rel, target])")
    assert links == [["https://example.org/", "noopener noreferrer", "_blank"]]
    expect(text).to_contain_text("[there](javascript:hacked=1)")
    assert text.locator("pre code").inner_text() == 'def f(x):\n    return "<b>"'
    expect(text.locator("p").last).to_have_text("end")


def test_a_finished_answer_looks_as_if_it_had_come_at_once(page: Page) -> None:
    """While it grows, a line such as ``2`` may yet become anything."""
    lists, paragraphs = page.evaluate(
        """async () => {
            const { Answer, AnswerView } = await import("./answer.js");
            const view = (text) => {
                const pieces = [...text].map((letter, index) => [index, letter, 1]);
                const answer = Object.assign(new Answer("exact"), { pieces, finished: true });
                const made = new AnswerView({ answers: [answer] }, { onGrow() {}, onEnd() {} });
                pieces.forEach((_, index) => made.draw(index + 1));
                made.finish();
                return made.part(".text");
            };
            const count = (text, tag) => view(text).querySelectorAll(tag).length;
            return [count("1. a\\n\\n2. b\\n\\n3. c", "ol"), count("Sum\\n-5 is less", "p")];
        }"""
    )
    assert (lists, paragraphs) == (1, 1)


def test_markdown_looks_the_same_when_it_comes_in_pieces(page: Page) -> None:
    show_text(page, MARKDOWN)
    grown, whole = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("./markdown.js");
            const shown = (ends) => {
                const element = document.createElement("div");
                const leaf = (start, end) => [document.createTextNode(text.slice(start, end))];
                const view = new MarkdownView(element, leaf);
                ends.forEach((end) => view.show(text.slice(0, end)));
                element.normalize();
                return element.innerHTML;
            };
            return [shown([...text].map((_, index) => index + 1)), shown([text.length])];
        }""",
        MARKDOWN,
    )
    assert grown == whole and "<pre>" in whole


@pytest.mark.parametrize("part", ["> ", "1. ", "*a _b ", "| ", "[", "`` "])
def test_text_that_is_nested_deeply_is_shown(page: Page, part: str) -> None:
    show_text(page, part * 3000 + "end")
    expect(page.locator(".turn .text")).to_contain_text("end")


def test_copying(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show_text(page, MARKDOWN)
    page.click(".turn .copy")
    expect(page.locator(".turn .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN
    page.click(".turn .copy-code")
    expect(page.locator(".turn .copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>"'


HOSTILE = [
    '<img src="x" onerror="hacked=1">',
    "[click](javascript:hacked=1)",
    "<script>hacked=1</script>",
    "\n\n",
    "**",
    "`",
    '<a href="javascript:hacked=1">click</a>',
    "[click](JaVaScRiPt:hacked=1)",
    "\n- ",
    '<iframe srcdoc="<script>parent.hacked=1</script>"></iframe>',
]


def test_a_model_that_writes_html_does_nothing(browser: Browser, letters: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(letters, tmp_path / "hostile"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = {each["id"]: each["content"] for each in tokenizer["added_tokens"]} | dict(enumerate(HOSTILE))
    tokenizer["model"] |= {"vocab": {name: index for index, name in names.items()}, "unk_token": HOSTILE[0]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with serving(model=folder) as address, opened(browser, address) as page:
        expect(page.locator("#slider")).to_be_enabled()
        fill_settings(page, temperature=2, seed=1)
        for question in ("abc", "abcd", "abcde"):
            send(page, question)
            idle(page)
            page.click("#new-chat")
        written = page.evaluate("localStorage.getItem('mars-chats')")
        assert all(json.dumps(each)[1:-1] in written for each in HOSTILE), "a weak test"
        page.click("[popovertarget=chats]")
        for index in range(page.locator("#chat-list button").count()):
            page.locator("#chat-list button").nth(index).click()
            allowed = "p, span, ul, ol, li, strong, em, code, pre, i, del, h4, h5, h6, blockquote, hr, div"
            assert page.locator(f".turn .text :not({allowed})").count() == 0
            page.click("[popovertarget=chats]")
        assert page.evaluate("typeof hacked") == "undefined"


# --- chats that are kept


def test_a_reload_keeps_the_chat_and_its_races(page: Page) -> None:
    cut_off(page, 40)
    send(page, LONG, "#race")
    idle(page)
    send(page, SHORT)
    idle(page)

    def shown() -> list[list[str]]:
        parts = (".question", ".text", ".verdict", ".lane-state", "dd")
        return [page.locator(f".turn {part}").all_inner_texts() for part in parts]

    before = shown()
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    assert shown() == before and len(before[0]) == 2
    bodies: list[dict] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    send(page, "abc")
    idle(page)
    assert [each["content"] for each in bodies[0]["messages"][::2]] == [LONG, SHORT, "abc"]


def test_chats_are_opened_again_and_deleted(page: Page) -> None:
    for question in (SHORT, "abc"):
        page.click("#new-chat")
        send(page, question)
        idle(page)
    page.click("[popovertarget=chats]")
    assert page.locator("#chat-list button").all_inner_texts() == ["abc", SHORT]
    page.locator("#chat-list button").last.click()
    assert page.locator(".turn .question").all_inner_texts() == [SHORT]
    page.click("#new-chat")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()
    page.click("[popovertarget=chats]")
    page.click("#forget")
    page.click("[popovertarget=chats]")
    expect(page.locator("#no-chats")).to_be_visible()
    assert page.evaluate("localStorage.getItem('mars-chats')") is None


def test_the_history_is_bounded(page: Page) -> None:
    page.evaluate("""async () => {
        const { keep } = await import("./history.js");
        const turn = { prompt: "abc", model: "", answers: [{ pieces: [[0, "a".repeat(1e5), 1]] }] };
        for (let id = 1; id <= 60; id += 1) keep({ id, turns: id % 2 ? [turn] : [{ ...turn, answers: [] }] });
    }""")
    ids = page.evaluate("JSON.parse(localStorage.getItem('mars-chats')).map(({ id }) => id)")
    assert ids == list(range(60, 30, -1))
    assert page.evaluate("localStorage.getItem('mars-chats').length") < 2e6


# --- the welcome


def test_the_welcome_shows_a_finished_race(page: Page, server: str) -> None:
    race = httpx.get(f"{server}/race.json").json()
    recorded = page.locator("#recorded")
    expect(recorded.locator("[data-stage=finished]")).to_be_visible(timeout=20_000)
    expect(recorded.locator(".question")).to_have_text(race["prompt"])
    expect(recorded.locator(".verdict")).to_contain_text("as fast")
    expect(recorded.locator(".note")).to_contain_text(f"The faster of {len(race['ratios'])} turns on each side")
    assert recorded.locator(".lane-dial").all_inner_texts() == [each["dial"] for each in race["answers"]]
    expect(recorded.locator(".provenance")).to_contain_text(race["provenance"]["machine"])
    for answer in race["answers"]:
        assert sum(tokens for _, _, tokens in answer["pieces"]) in (answer["tokens"], answer["tokens"] - 1)
    example = page.locator(".example").first
    text = example.inner_text()
    example.click()
    expect(page.locator("#question")).to_have_value(text)


def test_the_welcome_without_a_recorded_race(browser: Browser, server: str) -> None:
    with opened(browser, server, "404") as page:
        page.route("**/race.json", lambda route: route.fulfill(status=404))
        page.reload()
        expect(page.locator("#slider")).to_be_enabled()
        expect(page.locator("#welcome h2")).to_be_visible()
        expect(page.locator("#recorded")).to_be_hidden()
        send(page, SHORT)
        idle(page)
        assert page.inner_text(".turn .text")


# --- the dial


def test_the_stops_have_names(page: Page) -> None:
    names = page.locator("#stop-names > *").all_inner_texts()
    numbers = [".7", ".5", ".3", ".1", ".95", ".9", ".8", ".7"]
    assert names == ["one-token", "exact", *numbers, "relaxed", "threshold"]
    for width in (320, 390, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        boxes = [each.bounding_box() for each in page.locator("#stop-names span").all()]
        slider = page.locator("#slider").bounding_box()
        assert slider
        step = (slider["width"] - THUMB) / (STOPS - 1)
        for index, box in enumerate(boxes):
            assert box and box["x"] + box["width"] / 2 == pytest.approx(slider["x"] + THUMB / 2 + index * step, abs=2)


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
    expect(page.locator(".turn .dial-used")).to_have_text("exact, then one-token")


def test_the_text_has_a_mark_where_the_dial_was_turned(page: Page, http: httpx.Client) -> None:
    turn(page, http, "one-token")
    cut_off(page, 1500)
    send(page, LONG)
    expect(page.locator(".turn .text span").nth(5)).to_be_visible()
    http.put("/v1/dial", json={"dial": LOOSE})
    idle(page)
    [mark] = page.locator(".turn .turned").all()
    assert mark.get_attribute("aria-label") == f"The dial was turned to {LOOSE} here."
    assert LOOSE in mark.evaluate("mark => getComputedStyle(mark, '::before').content")
    [[kept]] = [turn["answers"] for turn in kept_turns(page)]
    [[forward, dial]] = kept["turned"]
    before = mark.evaluate("""mark => {
        const range = document.createRange();
        range.setStart(mark.closest(".text"), 0);
        range.setEndBefore(mark);
        return range.toString();
    }""")
    assert dial == LOOSE and forward > 5
    assert before == "".join(text for _, text, _ in kept["pieces"][:forward])
    sizes = [tokens for *_, tokens in kept["pieces"]]
    assert max(sizes[:forward]) == 1 < mean(sizes[forward:]), "the mark is somewhere else"


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
        assert page.locator(".turn .dial-used").all_inner_texts() == ["one-token", dial]
        assert page.locator(".trouble:visible").all_inner_texts() == [] and dial_of(http) == dial


# --- forwards in colour, and the race


def test_forwards_in_colour(page: Page, http: httpx.Client) -> None:
    turn(page, http, LOOSE)
    send(page, SHORT)
    idle(page)

    def styles() -> list[list[str]]:
        return page.locator(".turn .text span").evaluate_all("""all => all.map((each) => {
            const { backgroundColor, borderBottomWidth } = getComputedStyle(each);
            return [backgroundColor, borderBottomWidth, each.title];
        })""")

    expect(page.locator("#show-forwards")).to_be_checked()
    shown = styles()
    assert len({colour for colour, *_ in shown}) == 4 and all(one[0] != other[0] for one, other in pairwise(shown))
    tokens = [int(width.removesuffix("px")) for _, width, _ in shown]
    assert max(tokens) > 1, "one token per forward: a weak test"
    said = [f"Forward {index}: {count} token{'s' if count > 1 else ''}" for index, count in enumerate(tokens, 1)]
    assert [title for *_, title in shown] == said
    expect(page.locator("#legend")).to_be_visible()
    page.uncheck("#show-forwards")
    assert all(each == ["rgba(0, 0, 0, 0)", "0px", ""] for each in styles())
    expect(page.locator("#legend")).to_be_hidden()
    page.reload()
    expect(page.locator("#legend")).to_be_hidden()


def test_a_race(page: Page, http: httpx.Client) -> None:
    def race(question: str) -> list[str]:
        send(page, question, "#race")
        idle(page)
        return page.locator(".turn .text").all_inner_texts()

    one, other = race(SHORT)
    left, right = (each.bounding_box() for each in page.locator(".turn .answer").all())
    assert left and right and left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "not side by side"
    assert page.locator(".turn .dial-used").all_inner_texts() == ["one-token", "exact"]
    assert one == other != ""
    shown = r"(as fast|Equally fast within 5%|No faster: 1\.\d\d tokens per forward), the same text$"
    expect(page.locator(".turn .verdict")).to_have_text(re.compile(shown))
    turn(page, http, LOOSE)
    one, other = race(SHORT)
    plain, loose = map(int, figures(page, "forwards"))
    assert one and other and one != other and plain > loose
    expect(page.locator(".turn .verdict")).to_contain_text(", but the texts differ from the 1st word on")


def test_the_sides_of_a_race_run_in_turn(page: Page, server: Address) -> None:
    before = len(server.events("request"))
    cut_off(page, 400)
    send(page, LONG, "#race")
    expect(page.locator(".turn .verdict")).to_have_text("Recording exact…")
    idle(page)
    asked = [each for each in server.events("request")[before:] if each["path"] == "/v1/chat/completions"]
    first, second = sorted(asked, key=lambda each: each["time"])
    assert [first["dial"], second["dial"]] == ["exact", "one-token"], "warm caches favour the second: not the dial"
    begun = datetime.fromisoformat(second["time"]) - timedelta(seconds=second["seconds"])
    assert datetime.fromisoformat(first["time"]) <= begun


def test_a_race_is_replayed_at_its_pace(page: Page, http: httpx.Client) -> None:
    turn(page, http, LOOSE)  # so that most forwards write several tokens, and the ratio is shown
    cut_off(page, 400)
    page.evaluate("""() => {
        window.seen = [];
        const watch = () => {
            const board = document.querySelector(".turn .board[data-stage=replaying]");
            const bars = board && [...board.querySelectorAll("progress")].map(({ value, max }) => value / max);
            const verdict = board?.querySelector(".verdict").textContent;
            if (board) seen.push({ at: performance.now() / 1000, bars, verdict });
            requestAnimationFrame(watch);
        };
        watch();
    }""")
    send(page, LONG, "#race")
    idle(page)
    [[plain, dialled]] = [turn["answers"] for turn in kept_turns(page)]
    seen = page.evaluate("seen")
    assert seen[-1]["at"] - seen[0]["at"] == pytest.approx(max(plain["seconds"], dialled["seconds"]), abs=0.4)
    middle = [each["bars"] for each in seen if all(0.01 < bar < 0.99 for bar in each["bars"])]
    assert len({tuple(bars) for bars in middle}) > 3, "the bars did not run together"
    assert any(re.fullmatch(r"\d+\.\d times as fast", each["verdict"]) for each in seen), "no ratio while it ran"

    for answer in (plain, dialled):
        times = [at for at, *_ in answer["pieces"]]
        assert times == sorted(times) and answer["seconds"] == pytest.approx(times[-1] - times[0], abs=0.1)
        assert sum(tokens for *_, tokens in answer["pieces"]) == answer["tokens"] == 400
    rates = [
        sum(tokens for at, _, tokens in each["pieces"] if at > each["pieces"][0][0]) / each["seconds"]
        for each in (plain, dialled)
    ]
    ratio = rates[1] / rates[0]
    expected = "Equally fast within 5%" if abs(ratio - 1) < 0.05 else f"{ratio:.2f} times as fast"
    expect(page.locator(".turn .verdict")).to_contain_text(expected)
    assert [float(each) for each in figures(page, "rate")] == pytest.approx(rates, rel=0.01)
    expect(page.locator(".turn .verdict")).to_be_in_viewport()
    below = "all => all.map(({ scrollHeight, clientHeight, scrollTop }) => scrollHeight - clientHeight - scrollTop)"
    assert max(page.locator(".turn .window").evaluate_all(below)) < 2, "a text does not show its end"


def test_a_side_that_saves_no_forwards_is_not_called_faster(page: Page) -> None:
    shown = page.evaluate(
        """async () => {
            const { Answer } = await import("./answer.js");
            const { RaceView } = await import("./race.js");
            const side = (dial, forwards, seconds) => Object.assign(new Answer(dial), {
                pieces: Array.from({ length: forwards }, (_, at) => [at, "a".repeat(20 / forwards), 20 / forwards]),
                tokens: 20, forwards, seconds, finished: true,
            });
            return [20, 10].map((forwards) => {
                const view = new RaceView({ answers: [side("one-token", 20, 2), side("exact", forwards, 1)] });
                view.finish();
                return [view.part(".verdict").textContent, view.part(".note").textContent];
            });
        }"""
    )
    (verdict, note), (faster, other_note) = shown
    assert (
        verdict == "No faster: 1.00 tokens per forward, the same text" and "drafted only where that saves time" in note
    )
    assert faster == "1.89 times as fast, the same text" and "drafted" not in other_note


def test_a_replay_can_be_skipped_and_seen_again(page: Page) -> None:
    cut_off(page, 800)
    send(page, LONG, "#race")
    page.locator(".turn .skip").click(timeout=20_000)
    expect(page.locator(".turn [data-stage=finished]")).to_be_visible(timeout=300)
    page.click(".turn .replay")
    expect(page.locator(".turn [data-stage=replaying]")).to_be_visible(timeout=500)
    idle(page)
    page.emulate_media(reduced_motion="reduce")
    page.click(".turn .replay")
    expect(page.locator(".turn [data-stage=finished]")).to_be_visible(timeout=300)


def test_a_race_that_is_stopped_has_no_verdict(page: Page) -> None:
    cut_off(page, 1500)
    send(page, LONG, "#race")
    page.click("#stop")
    idle(page)
    expect(page.locator(".turn .verdict")).to_have_text("No verdict: the race was not finished.")
    expect(page.locator(".turn .picture")).to_be_hidden()


def test_a_picture_of_a_race(page: Page) -> None:
    cut_off(page, 40)
    send(page, LONG, "#race")
    idle(page)
    with page.expect_download() as download:
        page.click(".turn .picture")
    assert download.value.suggested_filename == "mars-race.png"
    picture = download.value.path().read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert [int.from_bytes(picture[start : start + 4]) for start in (16, 20)] == [1200, 630]


def test_a_race_needs_two_dials(page: Page, http: httpx.Client) -> None:
    turn(page, http, "one-token")
    send(page, SHORT, "#race")
    expect(page.locator("#composer-note")).to_contain_text("one-token would race against itself")
    expect(page.locator(".turn")).to_have_count(0)


# --- what it looks like


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_nothing_sticks_out(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    assert overhang(page) == 0
    cut_off(page, 60)
    send(page, LONG, "#race")
    idle(page)
    until(lambda: is_at_end(page))
    assert overhang(page) == 0
    expect(page.locator(".turn .verdict")).to_be_in_viewport()
    one, other = (each.bounding_box() for each in page.locator(".turn .answer").all())
    assert one and other and (one["y"] == other["y"]) == (width > 768), "side by side, or on a phone in a column"
    page.click("[popovertarget=settings]")
    expect(page.locator("#settings")).to_be_in_viewport(ratio=1)
    assert overhang(page) == 0


@pytest.mark.parametrize("width", [320, 390, 800, 1280])
def test_a_wide_histogram_has_room(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    show_text(page, *"abcdefghi")
    expect(page.locator(".turn .histogram li")).to_have_count(8)
    assert overhang(page) == 0
    boxes = [page.locator(f".turn .{each}").bounding_box() for each in ("answer", "histogram", "figures dl")]
    answer, *parts = filter(None, boxes)
    assert len(parts) == 2 and all(part["x"] + part["width"] <= answer["x"] + answer["width"] for part in parts)


def test_a_phone_shows_the_end_of_what_was_asked(page: Page) -> None:
    """Also where the welcome was scrolled down to its examples, and where the dial's explanation gives way."""
    page.set_viewport_size({"width": 390, "height": 844})
    cut_off(page, 600)  # so that the replay lasts
    page.locator(".example").last.scroll_into_view_if_needed()
    assert page.evaluate("scrollY") > 0, "a weak test"
    send(page, LONG, "#race")
    for stage in ("replaying", "finished"):
        expect(page.locator(f".turn .board[data-stage={stage}]")).to_be_visible(timeout=30_000)
        until(lambda: is_at_end(page))
        lanes = page.locator(".turn .lane").all()
        composer = page.locator("#composer").bounding_box()
        assert composer
        for box in (lane.bounding_box() for lane in lanes):
            assert box and box["y"] >= 0 and box["y"] + box["height"] <= composer["y"], f"{stage}: a lane is covered"
    send(page, LONG)
    idle(page)
    until(lambda: is_at_end(page))


def test_a_race_fits_a_low_screen(page: Page) -> None:
    page.set_viewport_size({"width": 1366, "height": 650})
    cut_off(page, 60)
    send(page, LONG, "#race")
    idle(page)
    until(lambda: is_at_end(page))
    board, name = page.locator(".turn .board").bounding_box(), page.locator(".turn .by").first.bounding_box()
    assert board and name and 0 <= board["y"] < board["y"] + board["height"] <= name["y"], "the board covers a text"


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
            return page.locator(".turn .trouble").is_visible()

        until(is_refused)
        expect(page.locator(".turn .trouble")).to_have_text("The server is busy. Please try again in 1 second.")
        page.click(".again")
        idle(page)
        expect(page.locator(".turn .trouble")).to_be_hidden()
        assert page.inner_text(".turn .text")


def test_a_prompt_that_is_too_long(browser: Browser, server: str) -> None:
    with opened(browser, server, "400") as page:
        page.set_viewport_size({"width": 390, "height": 600})
        send(page, "abc" * 800)
        expect(page.locator(".turn .trouble")).to_contain_text("The server refused: ")
        expect(page.locator(".turn .trouble")).to_contain_text("shorten the prompt")
        expect(page.locator(".turn .figures")).to_be_hidden()
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
        assert len(page.inner_text(".turn .text")) == 30, "the server's limit, which is below the page's"
        expect(page.locator(".turn .dial-used")).to_have_text("exact")
        assert set(page.evaluate("Object.keys(localStorage)")) <= {"mars-chats", "mars-settings"}
        assert '"use"' not in page.evaluate("JSON.stringify(localStorage)").replace("\\", ""), "the key is kept"
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
        expect(page.locator(".turn .trouble")).to_have_text(re.compile("The server has a problem: .*try again"))
        expect(page.locator(".again")).to_be_visible()
