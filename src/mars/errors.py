"""The one exception a user is meant to see."""


class MarsError(ValueError):
    """Something the user can put right; the message says how."""


def how_to_install(extra: str) -> str:
    """For messages about a missing package. MARS is on no index, so that its name there may be anybody's."""
    return f"install MARS with its extra {extra}: pip install '.[{extra}]' in its checkout"
