"""A loaded model with its tokenizer and settings."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars.models.prompts import Prompt, encode
from mars.models.settings import Settings, end_tokens


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: Settings | None = None  # None: not trained by MARS, so it decodes one token per forward

    @property
    def device(self) -> torch.device:
        return self.module.device

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
    def mask_token_id(self) -> int | None:
        return self.settings.mask_token_id if self.settings else None

    def encode(self, prompt: Prompt, system: str | None = None) -> list[int]:
        """Tokens of a prompt. A text becomes a user's message if the model has a chat template."""
        return encode(self.tokenizer, prompt, system, self.name)
