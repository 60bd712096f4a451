"""The one exception a user is meant to see."""


class MarsError(ValueError):
    """Something the user can put right; the message says how."""
