"""How methods of vLLM are replaced: every replacement names its reason, and is made once."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from mars.errors import MarsError

Method = Callable[..., Any]
Hook = tuple[Any, str, Method, str]
"""Class or module, name of its method, reason last. The function is called with the original before its arguments."""


def install(hooks: Iterable[Hook]) -> None:
    """A hook that is installed already is left as it is."""
    for target, name, function, _ in hooks:
        original = getattr(target, name, None)
        if original is None:
            raise MarsError(f"this vLLM has no {name}: use a version that MARS was tested with")
        if not hasattr(original, "mars_hook"):
            setattr(target, name, _replacement(original, function))


def _replacement(original: Method, function: Method) -> Method:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    call.mars_hook = True  # type: ignore[attr-defined]
    return call
