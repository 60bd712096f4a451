"""JSON schemas that no text can follow, and what llguidance says of grammars, in the caller's words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any
from urllib.parse import unquote

from mars.errors import MarsError

Schema = Any  # an object, or true or false
LONGEST = 200  # characters of a pattern or a reason that are shown


def require_finite(schema: Mapping[str, Any]) -> None:
    """Raise if every text that follows the schema would go on without end, as with ``{"$ref": "#"}``.

    A schema has a finite text if each of its `_needs` can be met by one that has.
    """
    needs: dict[int, list[list[Schema]]] = {}
    found: list[Schema] = [schema]
    while found:
        part = found.pop()
        if id(part) not in needs:
            needs[id(part)] = _needs(part, schema)
            found += chain.from_iterable(needs[id(part)])
    unmet = {part: len(groups) for part, groups in needs.items()}
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a part: who needs it, as which of its needs
    for part, groups in needs.items():
        for number, group in enumerate(groups):
            for member in group:
                users[id(member)].append((part, number))
    finite = [part for part, count in unmet.items() if not count]
    met: set[tuple[int, int]] = set()
    while finite:
        for user in users[finite.pop()]:
            if user not in met:
                met.add(user)
                unmet[user[0]] -= 1
                if not unmet[user[0]]:
                    finite.append(user[0])
    if unmet[id(schema)]:
        raise MarsError("no text can follow the schema: it refers to itself without an end", param="grammar")


def _needs(part: Schema, root: Schema) -> list[list[Schema]]:
    """What a text that follows this part must have in it; of each list one is enough."""
    if not isinstance(part, Mapping):
        return []
    needs = [[each] for each in _schemas(part.get("allOf"))]
    needs += [members for key in ("anyOf", "oneOf") if (members := _schemas(part.get(key)))]
    if isinstance(reference := part.get("$ref"), str):
        target = _resolve(reference, root)
        needs += [] if target is None else [[target]]
    if part.get("type") in ("object", ["object"]) and isinstance(properties := part.get("properties"), Mapping):
        required = part.get("required")
        names = required if isinstance(required, list) else []
        needs += [[properties[name]] for name in names if isinstance(name, str) and name in properties]
    if part.get("type") in ("array", ["array"]) and isinstance(least := part.get("minItems"), int):
        first = _schemas(part.get("prefixItems"))
        rest = [part["items"]] if least > len(first) and "items" in part else []
        needs += [[each] for each in first[:least] + rest]
    return needs


def _schemas(value: Any) -> list[Schema]:
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Schema) -> Schema | None:
    """What a reference within the schema stands for; None for others and those that lead nowhere."""
    own = root.get("$id")
    reference = reference.removeprefix(own) if isinstance(own, str) else reference
    if reference and not reference.startswith("#"):
        return None
    _, *keys = unquote(reference).split("/")
    part = root if unquote(reference).partition("/")[0] in ("", "#") else _anchored(unquote(reference)[1:], root)
    for key in (key.replace("~1", "/").replace("~0", "~") for key in keys):
        if isinstance(part, Mapping) and key in part:
            part = part[key]
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _anchored(name: str, root: Schema) -> Schema | None:
    parts: list[Any] = [root]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            if part.get("$anchor") == name:
                return part
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return None


REASONS = {
    r"regex parse error:\n +(?P<pattern>.*)\n(?:.*\n)*?error: (?P<reason>.*)": (
        "the pattern {pattern} is not a regular expression that can be used here: {reason}"
    ),
    r"lookarounds not supported yet; \w+ in regex /(?P<pattern>.*)/": (
        "the pattern {pattern} has an anchor or a word boundary in a place where that cannot be followed"
    ),
    r"Failed to generate regex for (?:integer|float) range": "minimum or maximum is too large to be followed",
    r"Unable to determine if regex is empty": "its patterns, formats and lengths are too much together",
    r"Unsatisfiable schema: Regex is empty": "no text has its pattern, format and length together",
    r"recursion limit exceeded|too deeply nested": "it is nested too deeply",
    r"\bpanic: |panicked at |\.rs:\d+": "it is beyond what can be compiled: write it more simply",
}  # what llguidance writes, and what it means


def explain(error: str) -> str:
    """What llguidance has against a grammar, without its internals."""
    error = error.partition("\n   1 | ")[0]  # there follows the grammar
    for sign, meaning in REASONS.items():
        if found := re.search(sign, error):
            return meaning.format_map({name: _short(text) for name, text in found.groupdict().items()})
    first = error.partition("\n")[0]
    return _short(re.sub(r'^(at )?\d+\(\d+\): |failed to compile JSON schema: |failed to parse "?%json"?: ', "", first))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
