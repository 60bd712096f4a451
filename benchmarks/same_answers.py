"""Do two models write the same answers to the six benchmarks, item by item?

    mars eval --model smollm2-135m-base --dials one-token --limit 100 --dtype float32 --out base
    mars eval --model smollm2-135m --dials one-token,exact --limit 100 --dtype float32 --out converted
    python benchmarks/same_answers.py base converted --out same_answers.json

Answers of the first folder's one-token are compared with those of every dial of the second.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mars.evaluation.benchmarks import ALL
from mars.evaluation.provenance import collect


def answers(folder: Path, task: str, dial: str) -> dict[str, dict[str, Any]]:
    """What was written, by item."""
    file = folder / "answers" / f"{task}.{dial}.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["item"]: row for row in rows}


def written(answer: dict[str, Any]) -> str:
    """The text, or the digest of a text that may not be kept."""
    return answer["text"] if "text" in answer else answer["digest"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("converted", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dials = sorted({file.stem.split(".", 1)[1] for file in (args.converted / "answers").iterdir()})
    if not dials:
        sys.exit(f"{args.converted} has no answers: did its run reach its end?")
    rows = []
    for task in ALL:
        base = answers(args.base, task, "one-token")
        for dial in dials:
            converted = answers(args.converted, task, dial)
            if base.keys() != converted.keys():
                sys.exit(f"{task}: the folders have other items; give both runs the same --limit and --seed")
            if any(base[item]["asked"] != converted[item]["asked"] for item in base):
                sys.exit(f"{task}: the models were not asked the same")
            same = [written(base[item]) == written(converted[item]) for item in base]
            sums = {name: sum(row[name] for row in converted.values()) for name in ("tokens", "forwards")}
            rows.append({"task": task, "dial": dial, "items": len(same), "identical": sum(same), **sums})
            print(rows[-1])
    ran = {name: json.loads((getattr(args, name) / "eval.json").read_text()) for name in ("base", "converted")}
    args.out.write_text(json.dumps({**ran, "rows": rows, "provenance": collect()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
