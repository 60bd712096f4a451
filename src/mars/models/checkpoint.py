"""A loaded model with its tokenizer and settings."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars.method.markov import MarkovHead
from mars.models.gated import GatedAdapter
from mars.models.prompts import Prompt, encode
from mars.models.settings import Settings, end_tokens


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: Settings | None = None  # None: not trained by MARS, so it decodes one token per forward
    adapter: GatedAdapter | None = None  # attached to the module; None: the weights themselves were trained
    is_int8: bool = False  # may the engine keep the weights in 8 bits or fewer?

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def form(self) -> str:
        """The precision of the weights that the engine decodes with: a dtype's name, or ``int8``."""
        return "int8" if self.is_int8 else str(self.module.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """The number of logits: rows of the output layer."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """The longest text that the model supports, prompt and answer together."""
        config = self.module.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None)

    @property
    def end_tokens(self) -> frozenset[int]:
        return end_tokens(self.module, self.tokenizer)

    @property
    def block_size(self) -> int:
        """Tokens that a forward predicts by default; 1 for a model that was not converted."""
        return self.settings.block_size if self.settings else 1

    @property
    def mask_token_id(self) -> int | None:
        return self.settings.mask_token_id if self.settings else None

    @property
    def banned_token(self) -> int | None:
        """The mask token, which is never sampled, if it has a logit at all: a gated adapter's has none."""
        mask = self.mask_token_id
        return mask if mask is not None and mask < self.vocabulary else None

    @property
    def head(self) -> MarkovHead | None:
        return self.adapter.head if self.adapter else None

    def encode(self, prompt: Prompt, system: str | None = None) -> list[int]:
        """Tokens of a prompt. A text becomes a user's message if the model has a chat template."""
        return encode(self.tokenizer, prompt, system, self.name)
