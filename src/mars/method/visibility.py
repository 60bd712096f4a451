"""Who sees whom: one rule for the streams of a training forward and for the windows of a decoding forward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

PADDING = -1  # the document of a token that belongs to none


class Visibility(NamedTuple):
    """What decides who sees whom, for queries or for keys: tensors of one shape, or such that broadcast."""

    document: Tensor
    group: Tensor  # 0 for text; the masks of one group share a number
    position: Tensor  # where in the text the token stands; for a mask, the token it stands in for
    reach: Tensor  # the last position of the text that it sees

    def at(self, row: Tensor, column: Tensor) -> Visibility:
        return Visibility(*(each[row, column] for each in self))


def sees(query: Visibility, key: Visibility, sliding: int | None = None) -> Tensor:
    """A token sees the text of its document up to its reach, and the masks of its own group up to itself."""
    text = (key.group == 0) & (key.position <= query.reach)
    own = (key.group == query.group) & (key.position <= query.position)
    visible = (key.document == query.document) & (text | own)
    return visible if sliding is None else visible & (query.position - key.position < sliding)


def visibility_table(queries: Visibility, keys: Visibility, sliding: int | None = None) -> Tensor:
    """The rule as a table: (rows, queries) against (rows, keys) gives (rows, queries, keys)."""
    asking = Visibility(*(each[..., :, None] for each in queries))
    return sees(asking, Visibility(*(each[..., None, :] for each in keys)), sliding)
