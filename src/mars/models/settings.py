"""MARS settings of a checkpoint.

They are in ``mars/config.json`` with a gated adapter, else under ``mars`` in ``generation_config.json``, which other
software ignores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from mars.errors import MarsError
from mars.method.acceptance import Dial

KEY = "mars"
SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p", "typical_p")
NEW_TOKEN = "<|mask|>"
SPARE_NAME = re.compile(r"mask|reserved|unused|extra|dummy|placeholder|empty", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a model was trained with, and its default dial."""

    mask_token_id: int
    block_size: int = 4
    dial: str = "exact"

    def __post_init__(self) -> None:
        if not isinstance(self.mask_token_id, int) or self.mask_token_id < 0:
            raise MarsError(f"mask_token_id must be a token id, not {self.mask_token_id!r}")
        if not isinstance(self.block_size, int) or self.block_size < 2:
            raise MarsError(f"block_size must be a whole number of 2 or more, not {self.block_size!r}")
        Dial.parse(self.dial)

    @classmethod
    def read(cls, config: GenerationConfig | None) -> Settings | None:
        """The settings in a generation config, or None for a checkpoint that MARS has not trained."""
        stored = getattr(config, KEY, None)
        if stored is None:
            return None
        try:
            return cls(**stored)
        except (TypeError, AttributeError, MarsError) as error:
            raise MarsError(f"the {KEY!r} settings in generation_config.json are not usable: {error}") from None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """The settings in the config of a gated adapter."""
        try:
            return cls(**{each.name: config[each.name] for each in fields(cls)})
        except (LookupError, TypeError, MarsError) as error:
            raise MarsError(f"the settings in mars/config.json are not usable: {error}") from None

    def write(self, config: GenerationConfig) -> None:
        setattr(config, KEY, asdict(self))
        for name in SAMPLING_FLAGS if not config.do_sample else ():  # unused flags: transformers refuses to save them
            setattr(config, name, None)
        config._from_model_config = False  # else transformers rebuilds it from config.json and drops the settings


def choose_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """A token id that no text has: an unused row of the embedding, else an unused special token, else a new row."""
    rows = model.get_input_embeddings().num_embeddings
    if rows > rows_needed(tokenizer):
        return rows - 1
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    busy, template = named | end_tokens(model, tokenizer), str(tokenizer.chat_template or "")
    unused = {
        token: str(added)
        for token, added in sorted(tokenizer.added_tokens_decoder.items())
        if added.special and token not in busy and str(added) not in template
    }
    if unused:
        telling = [token for token, name in unused.items() if SPARE_NAME.search(name)]
        return (telling or list(unused))[-1]
    tokenizer.add_tokens([NEW_TOKEN], special_tokens=True)
    model.resize_token_embeddings(rows_needed(tokenizer), mean_resizing=False)
    return int(tokenizer.convert_tokens_to_ids(NEW_TOKEN))


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding must have; more than there are tokens if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer: those of the generation config and the tokenizer's own."""
    config = model.generation_config
    listed = config.eos_token_id if config is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(token for token in [*ids, tokenizer.eos_token_id] if token is not None)
