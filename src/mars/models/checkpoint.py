"""A loaded model with its tokenizer and settings, and the way from a prompt to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.models.settings import Settings, end_tokens

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]
"""A question, a chat, or tokens to continue as they are"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    name: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    settings: Settings | None = None
    """None: not trained by MARS, so it decodes one token at a time"""

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def vocabulary(self) -> int:
        """Rows of the output layer: what a logit vector has."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def context(self) -> int | None:
        """Longest text the model can hold, prompt and answer together."""
        config = self.module.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None)

    @property
    def end_tokens(self) -> frozenset[int]:
        return end_tokens(self.module, self.tokenizer)

    @property
    def mask_token_id(self) -> int | None:
        return self.settings.mask_token_id if self.settings else None

    def encode(self, prompt: Prompt, system: str | None = None) -> list[int]:
        """Tokens of a prompt. Text becomes a user's message where the model knows how to chat."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise MarsError("the prompt is empty: write a question or some text to continue")
            if self.tokenizer.chat_template is None and system is None:
                return list(self.tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        elif not prompt:
            raise MarsError("the prompt is empty: give at least one message or token")
        elif isinstance(prompt[0], Integral):
            if system is not None:
                raise MarsError("a system prompt needs text or messages, not tokens")
            return [int(token) for token in cast(Sequence[int], prompt)]
        return self._encode_chat(cast(Messages, prompt), system)

    def _encode_chat(self, messages: Messages, system: str | None) -> list[int]:
        if self.tokenizer.chat_template is None:
            raise MarsError(f"{self.name} has no chat template, so it cannot chat: give plain text, no system prompt")
        opening = [] if system is None else [{"role": "system", "content": system}]
        try:
            tokens = self.tokenizer.apply_chat_template(
                [*opening, *map(dict, messages)], add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are programs of the model's authors and raise what they like
            raise MarsError(f"the chat template of {self.name} refuses these messages: {error}") from error
        return list(tokens["input_ids"])
