"""Record a race from the chat page, as README and the page's welcome show it.

    python benchmarks/record_race.py --dtype bfloat16 --out results/race-cpu.json

A real browser asks the page of a real server for a race, several times over; of each side the fastest turn is kept. The
race also becomes the page's ``race.json``. Then: ``make results``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from race_picture import rate, ratio
from server_process import mars_serve

import mars
from mars.evaluation.provenance import collect

PROMPT = "Tom has 3 boxes with 12 apples each. How many apples does he have?"
WELCOME = Path(mars.__file__).parent / "serving" / "page" / "race.json"


def record(page: Page, prompt: str) -> dict[str, Any]:
    """One race in a new chat, as the page keeps it in its history."""
    page.click("#new-chat")
    page.fill("#question", prompt)
    page.click("#race")
    page.wait_for_selector(".turn .board[data-stage=finished]", timeout=600_000)
    return page.evaluate("JSON.parse(localStorage.getItem('mars-chats'))[0].turns.at(-1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    serving = mars_serve("--model", args.model, "--dtype", args.dtype, "--rows", 1)
    with serving as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(reduced_motion="reduce").new_page()  # the finish is shown at once
        page.goto(server.address)
        page.wait_for_selector("#slider:enabled")
        races = [record(page, args.prompt) for _ in range(args.turns)]
        browser.close()
    sides = zip(*(race["answers"] for race in races), strict=True)
    best = races[0] | {"answers": [max(side, key=rate) for side in sides]}
    for race in races:
        print(" and ".join(f"{rate(side):.0f}" for side in race["answers"]), f"tokens/s: {ratio(race):.2f}")
    facts = {"ratios": [ratio(race) for race in races], "provenance": collect() | {"dtype": args.dtype}}
    for path in (args.out, WELCOME):
        path.write_text(json.dumps(best | facts, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
