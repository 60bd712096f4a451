"""The Markov head: what the token before a mask says about the mask's own token."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear


class MarkovHead(nn.Module):
    """A table over pairs of tokens of low rank, added to the logits of masks.

    Masks of a group predict their tokens without knowing what the masks before them will turn into. In training the
    token before a mask is the text's own; in decoding it is the AR model's token, and then the draft just made.
    """

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(vocabulary, rank) * rank**-0.5)
        self.after = nn.Parameter(torch.zeros(vocabulary, rank))

    def forward(self, tokens: Tensor) -> Tensor:
        """(…,) tokens before masks to (…, vocabulary): what is added to the masks' logits."""
        return linear(embedding(tokens, self.before), self.after)
