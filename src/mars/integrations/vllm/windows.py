"""What a row feeds next: k drafts, then masks, always as many as fit the step's one shape. Pure functions.

A window is a sure token, ``drafts`` that the masks of the forward before predicted, and masks. The logits behind the
sure token and the drafts are the AR model's and decide what is accepted. Those behind the first masks say what comes
after, if all drafts were accepted; if one was not, they stood behind a text that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def drafts_in(fed: Sequence[int], mask: int) -> int | None:
    """How many drafts come before the first mask; None if the row fed no window of ours."""
    if mask not in fed or min(fed) < 0:  # vLLM pads with -1
        return None
    return fed.index(mask)


def next_window(
    fed: Sequence[int], emitted: int, best: Sequence[int], *, mask: int, masks: int, trusted: int | None = None
) -> list[int]:
    """The places behind the next sure token.

    ``fed`` are those of the last window, ``emitted`` the tokens that came of it, ``best`` the likeliest token behind
    every place of it, the sure token's first. Of the masks' words, only the first ``trusted`` are taken, if given.
    """
    drafts: list[int] = []
    known = drafts_in(fed, mask)
    if known is not None and emitted == known + 1:
        drafts = list(best[known + 1 : len(fed) + 1][:masks])[:trusted]
    return drafts + [mask] * (2 * masks - len(drafts))


def masks_for(rows: int, windows: Mapping[int, int], most: int) -> int:
    """How many masks so many running requests get: ``windows`` has them from so many requests on."""
    reached = [least for least in windows if least <= rows]
    return windows[max(reached)] if reached else most
