"""The one exception a user is meant to see."""


class MarsError(ValueError):
    """Something the user can put right; the message says how. ``param`` names the parameter to blame, if it is one."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
