"""What a dial would gain on a text, worked out from every mask's guess at every place, without decoding it."""

from __future__ import annotations

from collections.abc import Sequence


def replay(correct: Sequence[int], block_size: int, *, tree: bool = False) -> tuple[int, int]:
    """Tokens and forwards that ``exact`` would need for one answer.

    ``correct[a]`` says how many masks behind place ``a`` guess right from the first on, where place 0 is the last
    token of the prompt. An answer of ``n`` tokens has ``n`` places.
    """
    written, forwards, anchor = 0, 0, None
    while written < len(correct):
        forwards += 1
        if anchor is None:  # masks only: the next token, and guesses behind the place it was written from
            anchor, written = written, written + 1
            continue
        accepted = min(correct[anchor], block_size - 1, len(correct) - written)
        all_passed = accepted == block_size - 1
        # A window's own masks stand behind its last draft; in a tree also behind every other one
        anchor = written + accepted if tree or all_passed else None
        written += accepted + 1
    return len(correct), forwards
