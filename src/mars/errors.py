"""The one exception a user is meant to see, and the checks of numbers that raise it."""

import math
from numbers import Integral, Real


class MarsError(ValueError):
    """Something the user can put right; the message says how. ``param`` names the parameter to blame, if it is one."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def require_integer(name: str, value: object, least: int | None = None) -> None:
    """Raise if a value is no whole number, or less than ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise MarsError(f"{name} must be a whole number, not {value!r}", param=name)
    if least is not None and int(value) < least:
        raise MarsError(f"{name} must be at least {least}, not {value}", param=name)


def require_number(name: str, value: object) -> None:
    """Raise if a value is no number, or not a finite one."""
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise MarsError(f"{name} must be a finite number, not {value!r}", param=name)


def how_to_install(extra: str) -> str:
    """For messages about a missing package. MARS is on no index, so that its name there may be anybody's."""
    return f"install MARS with its extra {extra}: pip install '.[{extra}]' in its checkout"
