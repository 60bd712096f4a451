"""Windows as vLLM feeds them: ``last token | drafts | masks``, a chain whose masks follow the last draft at once.

To vLLM all tokens behind the last one are speculative. A full window has twice as many of them as there are masks in
a group, so every window of a step has one length however many drafts it begins with.
"""

import torch
from torch import Tensor

from mars.method.acceptance import leading
from mars.method.visibility import Visibility
from mars.method.windows import NO_GROUP, Candidates, WindowBatch


def read_windows(tokens: Tensor, starts: Tensor, *, mask_token: int, width: int, masks: int) -> WindowBatch:
    """The windows of a step from its flat ``tokens``; ``starts`` (sequences + 1,) says where each window begins.

    ``width`` is the number of tokens behind the last one in a full window, at most half of which are drafts. At most
    ``masks`` masks of a window are read. vLLM may cut a window at its end, and marks padding by -1: a window with
    padding has no mask group.
    """
    first, lengths = starts[:-1].long(), starts.diff().long() - 1
    column = torch.arange(width + 1, device=tokens.device)
    inside = column <= lengths[:, None]
    window = tokens[(first[:, None] + column).clamp(max=len(tokens) - 1)].long()
    window = torch.where(inside, window, mask_token)
    before = leading(window[:, 1:] != mask_token)  # tokens between the last token and the first mask

    drafts, verified = window[:, 1 : width // 2 + 1], column[: width // 2 + 1]
    is_draft = (drafts != mask_token) & (drafts >= 0)
    padded = (window < 0).any(1)
    mask_count = torch.where(padded, 0, lengths - before).clamp(max=masks)
    group_exists = (verified == before[:, None]) & (mask_count > 0)[:, None]
    is_mask = column > before[:, None]
    return WindowBatch(
        tokens=window,
        visibility=Visibility(
            document=torch.zeros_like(window),
            group=is_mask.long(),
            position=column.expand_as(window),
            reach=torch.where(is_mask, before[:, None], column),
        ),
        drafts=torch.where(is_draft, drafts, 0),  # no other token may be outside the vocabulary
        draft_count=leading(is_draft),
        groups=torch.where(group_exists, before[:, None] + 1, NO_GROUP),
        mask_count=mask_count,
        masks=masks,
        rows=(first[:, None] + column).clamp(max=len(tokens) - 1),
        candidates=Candidates.of([[]] * len(first), 0, tokens.device),
    )
