"""JSON schemas that no text can follow, and what llguidance says of grammars, in the caller's words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import chain
from typing import Any
from urllib.parse import unquote

from mars.errors import MarsError

Schema = Any  # an object, or true or false
STEP_DIGITS = 5  # of all ``multipleOf`` together; with two more, llguidance takes seconds
LONGEST = 200  # characters of a pattern or a reason that are shown


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise if no text can follow a schema, or if llguidance would take minutes to compile it."""
    _require_finite(schema)
    steps = {step for part in _parts(schema) if type(step := part.get("multipleOf")) in (int, float)}
    digits = sum(len(Decimal(str(step)).normalize().as_tuple().digits) for step in steps)
    if digits > STEP_DIGITS:  # several in one allOf count like their product
        rule = f"at most {STEP_DIGITS} can be used"
        raise MarsError(f"the schema's multipleOf has {digits} digits: {rule}", param="grammar")


def _require_finite(schema: Mapping[str, Any]) -> None:
    """Raise if every text that follows the schema would go on without end, as with ``{"$ref": "#"}``.

    A schema has a finite text if each of its `_needs` can be met by one that has.
    """
    needs: dict[int, list[list[Schema]]] = {}
    names = _names(schema)
    found: list[Schema] = [schema]
    while found:
        part = found.pop()
        if id(part) not in needs:
            needs[id(part)] = _needs(part, names)
            found += chain.from_iterable(needs[id(part)])
    unmet = {part: len(groups) for part, groups in needs.items()}
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a part: who needs it, as which of its needs
    for user, groups in needs.items():
        for number, group in enumerate(groups):
            for member in group:
                users[id(member)].append((user, number))
    finite = [part for part, count in unmet.items() if not count]
    met: set[tuple[int, int]] = set()
    while finite:
        for user, number in users[finite.pop()]:
            if (user, number) not in met:
                met.add((user, number))
                unmet[user] -= 1
                if not unmet[user]:
                    finite.append(user)
    if unmet[id(schema)]:
        raise MarsError("no text can follow the schema: it refers to itself without an end", param="grammar")


def _needs(part: Schema, names: Mapping[str, Schema]) -> list[list[Schema]]:
    """What a text that follows this part must have in it; of each list one is enough."""
    if not isinstance(part, Mapping):
        return []
    needs = [[each] for each in _listed(part.get("allOf"))]
    needs += [members for key in ("anyOf", "oneOf") if (members := _listed(part.get(key)))]
    if isinstance(reference := part.get("$ref"), str):
        target = _resolve(reference, names)
        needs += [] if target is None else [[target]]
    if part.get("type") in ("object", ["object"]) and isinstance(properties := part.get("properties"), Mapping):
        required = [name for name in _listed(part.get("required")) if isinstance(name, str)]
        needs += [[properties[name]] for name in required if name in properties]
    if part.get("type") in ("array", ["array"]) and isinstance(least := part.get("minItems"), int):
        first = _listed(part.get("prefixItems"))
        rest = [part["items"]] if least > len(first) and "items" in part else []
        needs += [[each] for each in first[: max(0, least)] + rest]
    return needs


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(root: Mapping[str, Any]) -> dict[str, Schema]:
    """Parts of a schema that references can begin with."""
    names: dict[str, Schema] = {"": root, "#": root}
    for part in _parts(root):
        if isinstance(anchor := part.get("$anchor"), str):
            names[f"#{anchor}"] = part
        if isinstance(own := part.get("$id"), str):
            names[own] = part
    return names


def _resolve(reference: str, names: Mapping[str, Schema]) -> Schema | None:
    """What a reference within the schema stands for; None for others and those that lead nowhere."""
    name, is_pointer, pointer = unquote(reference).partition("#/")
    part = names.get(name)
    for key in (key.replace("~1", "/").replace("~0", "~") for key in pointer.split("/") if is_pointer):
        if isinstance(part, Mapping) and key in part:
            part = part[key]
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _parts(schema: Schema) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            parts += part.values()
        elif isinstance(part, list):
            parts += part


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
    r"oneOf constraints are not supported": "oneOf needs schemas that exclude each other: use anyOf",
    r"Resource '(?:json-schema:///)?(?P<name>[^']*)' is not present": "the reference {name} leads out of the schema",
    r"Pointer '(?:/anyOf/\d+/properties/(?:arguments|parameters))?(?P<name>[^']*)' does not exist": (
        "the reference #{name} leads nowhere"
    ),  # parameters of a tool are in the schema of its calls
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
