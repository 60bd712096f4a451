"""Puts decoding into a checkpoint folder as one file, which needs torch, transformers and safetensors only.

The file is made of `custom_generate` and of whatever it uses of the modules of the method and of gated adapters.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mars import errors
from mars.integrations.transformers import custom_generate
from mars.method import acceptance, markov, sampling, tensors, visibility, windows
from mars.models import adapter_files, gated, layout

FILE = Path("custom_generate", "generate.py")  # where ``model.generate(custom_generate=folder)`` looks for it
MODULES = (errors, tensors, visibility, windows, sampling, markov, acceptance, layout, gated, adapter_files)


def ship(folder: Path) -> None:
    """Add the file to a checkpoint folder; an older one there is replaced."""
    target = folder / FILE
    target.parent.mkdir(exist_ok=True)
    target.write_text(bundle())


def bundle() -> str:
    """The source of the file."""
    main = inspect.getsource(custom_generate)
    docstring = ast.get_docstring(ast.parse(main), clean=False)
    imports, definitions = list[str](), dict[str, str]()
    for module in (*MODULES, custom_generate):
        for names, source in _statements(module):
            if not names:
                imports += [] if "mars" in source or source in imports else [source]
            for name in names:
                if name in definitions:
                    raise RuntimeError(f"two of the bundled modules define {name}")
                definitions[name] = source
    mine = {name for names, _ in _statements(custom_generate) for name in names}
    used = _used(mine, definitions)
    wanted = [source for name, source in definitions.items() if name in used]
    parts = [f'"""{docstring}"""', "from __future__ import annotations", "\n".join(imports), *dict.fromkeys(wanted)]
    return "\n\n\n".join(parts) + "\n"


def _statements(module: ModuleType) -> Iterator[tuple[list[str], str]]:
    """The top-level statements of a module: what each defines, nothing for an import, and its source."""
    source = inspect.getsource(module)
    lines, body = source.splitlines(), ast.parse(source).body
    for index, node in enumerate(body):
        if isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            continue
        after = body[index + 1] if index + 1 < len(body) else None
        end = after.end_lineno if isinstance(after, ast.Expr) else node.end_lineno  # a string documents a constant
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        yield _names(node), "\n".join(lines[start - 1 : end])


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _used(names: set[str], definitions: dict[str, str]) -> set[str]:
    """These definitions and all that they refer to."""
    used, left = set[str](), set(names)
    while left:
        used |= left
        trees = [ast.parse(definitions[name]) for name in left]
        found = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
        left = (found & definitions.keys()) - used
    return used
