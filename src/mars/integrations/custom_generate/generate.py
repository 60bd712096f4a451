"""Decode several tokens per forward with a model trained by MARS. Needs torch and transformers, nothing else.

    folder = "…"  # of this checkpoint, or its name on the hub; a string, for transformers knows no other
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generate(**inputs, custom_generate=folder, trust_remote_code=True, dial="exact", max_new_tokens=200)

or, if the model itself was loaded with ``trust_remote_code=True``, just ``model.generate(**inputs, dial="exact")``.

The model has learned to read mask tokens: given ``… x M M M``, its ordinary next-token logits at ``x`` and at the three
masks predict the next four tokens. The first of the four is the prediction of the autoregressive (AR) model itself; the
other three are guesses. The *dial* says what becomes of them:

``one-token``    no masks: the AR model
``exact``        a guess is a draft: the next forward feeds it, which tells what the AR model would have written in its
                 place, and it is emitted only if that is the same. Same text as the AR model, or same distribution.
``relaxed=δ``    a draft also passes if the AR model gives it at least δ times the probability of its best token
``threshold=τ``  guesses are emitted unchecked, from the left, while the top probability of their mask is at least τ

A forward thus feeds a window ``decided text that is not cached yet | drafts | masks``. It checks the drafts, yields the
AR model's own token behind the last draft that passed, and, if all of them passed, the next guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import BaseStreamer
from transformers.generation import logits_process as process

PENALTIES = {"repetition_penalty": (process.RepetitionPenaltyLogitsProcessor, 1)}
TRUNCATIONS = {
    "temperature": (process.TemperatureLogitsWarper, 1),
    "top_k": (process.TopKLogitsWarper, 0),
    "top_p": (process.TopPLogitsWarper, 1),
    "min_p": (process.MinPLogitsWarper, 0),
}
"""Sampling options in the order in which they apply: what applies them, and the value that switches them off"""
HONOURED = {"mars", "dial", "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "do_sample"}
WITHOUT_EFFECT = {"bos_token_id", "use_cache", "trust_remote_code", "transformers_version", "_from_model_config"}
KNOWN = {*HONOURED, *WITHOUT_EFFECT, *PENALTIES, *TRUNCATIONS}
OFF: dict[str, object] = {
    **dict.fromkeys(["num_beams", "num_beam_groups", "num_return_sequences", "length_penalty"], 1),
    **dict.fromkeys(["typical_p", "encoder_repetition_penalty", "guidance_scale"], 1),
    **{"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4},
    **dict.fromkeys(["assistant_lookbehind", "target_lookbehind"], 10),
    "cache_implementation": "hybrid",
}
"""Values that ask for nothing, though they are not None, False, 0 or empty: defaults that transformers itself may write
into a config, and what Gemma 2 has there from before transformers stopped listening to it"""


@torch.no_grad()
def generate(
    inputs: Tensor | None = None,  # the first, because `model.generate(ids)` can arrive as `generate(ids, model=model)`
    generation_config: GenerationConfig | None = None,
    *,
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> Tensor:
    """Prompts with their answers, (rows, longest), padded at the right like those of transformers' own ``generate``.

    ``dial``: ``one-token``, ``exact``, ``relaxed=0.3`` or ``threshold=0.9``; by default the checkpoint's own. The other
    options are transformers', with its defaults: max_new_tokens, max_length, eos_token_id, pad_token_id, do_sample,
    temperature, top_k, top_p, min_p, repetition_penalty. Whatever else is switched on is refused.

    Rows are decoded one after the other. What the call took is left in ``model.mars_statistics``: a dictionary with
    ``tokens``, ``forwards`` and ``tokens_per_forward``, over all rows.
    """
    options = _options(model, generation_config, kwargs)
    method = Method.read(options)
    ids = _prompts(inputs, input_ids)
    limit = _limit(options, ids.shape[1])
    ends = [] if options.get("eos_token_id") is None else torch.as_tensor(options["eos_token_id"]).flatten().tolist()
    padding = options.get("pad_token_id")
    rows = [_decode(model, row, limit, ends, method) for row in _unpad(ids, attention_mask, padding, ends)]
    if streamer is not None:
        rows = [_streamed(ids, rows, streamer)]
    runs = [list(row) for row in rows]
    tokens, forwards = sum(len(run) for row in runs for run in row), sum(map(len, runs))
    model.mars_statistics = {"tokens": tokens, "forwards": forwards, "tokens_per_forward": tokens / forwards}
    filler = padding if padding is not None else ends[0] if ends else 0
    return torch.cat([ids, pad_sequence([torch.cat(row) for row in runs], True, filler)], 1)


def _decode(model: PreTrainedModel, prompt: Tensor, limit: int, ends: list[int], method: Method) -> Iterator[Tensor]:
    """Continue one prompt; yields the run of tokens that each forward emits."""
    cache = DynamicCache()  # made without a config, sliding layers keep their whole past, so it can be rolled back
    text, drafts, noise = prompt, prompt[:0], None
    while room := limit + len(prompt) - len(text):
        masks = max(0, min(method.masks, room - 1 - len(drafts)))
        beliefs, scores = _forward(model, cache, text, drafts, masks, method)
        noise = method.noise(scores, noise)
        choices = (scores + noise).argmax(1)
        accepted = method.check(drafts, choices, beliefs, scores)
        run = torch.cat([drafts[:accepted], choices[accepted : accepted + 1]])[:room]
        cache.crop(len(text) + accepted - cache.get_seq_length())  # negative: forget masks and failed drafts

        # Masks stand behind the last draft; if it or one before it failed, they have guessed on from a wrong text.
        start = len(drafts) + 1 if accepted == len(drafts) else len(scores)
        drafts, noise = choices[start:], noise[start:]
        if not method.checks:
            run = torch.cat([run, drafts[: method.trusted(beliefs[start:])]])
            drafts, noise = drafts[:0], noise[:0]

        stops = torch.isin(run, run.new_tensor(ends)).nonzero()
        yield run[: int(stops[0]) + 1] if len(stops) else run
        if len(stops):
            return
        text = torch.cat([text, run])


def _forward(
    model: PreTrainedModel, cache: DynamicCache, text: Tensor, drafts: Tensor, masks: int, method: Method
) -> tuple[Tensor, Tensor]:
    """Beliefs and scores at the last decided token, the drafts and the masks."""
    fresh = text[cache.get_seq_length() :]
    window = torch.cat([fresh, drafts, fresh.new_full((masks,), method.mask)])
    tail = 1 + len(drafts) + masks
    output = model(input_ids=window[None], past_key_values=cache, use_cache=True, logits_to_keep=tail)
    return method.read_logits(output.logits[0, -tail:].to(text.device), text, drafts)


@dataclass(frozen=True)
class Method:
    """How a call decodes: its dial and its sampling.

    Two things matter for a position. *Beliefs* are the model's logits after the repetition penalty. *Scores* are what a
    token is drawn by: beliefs after temperature and truncation. A draw is the best score after noise (Gumbel's); greedy
    is a draw without. A draft is drawn and checked with the same noise, so it passes if it is what the AR model draws.
    """

    mask: int
    masks: int
    checks: bool
    value: float
    """δ or τ; 1 where the dial has none"""
    samples: bool
    penalise: LogitsProcessorList
    truncate: LogitsProcessorList

    @classmethod
    def read(cls, options: dict[str, Any]) -> Method:
        settings = options.get("mars")
        if not isinstance(settings, dict) or not {"mask_token_id", "block_size"} <= settings.keys():
            raise ValueError("this checkpoint has no MARS settings: they belong under `mars` in generation_config.json")
        kind, value = _parse(str(options.get("dial") or settings.get("dial", "exact")))
        masks = 0 if kind == "one-token" else settings["block_size"] - 1
        samples = bool(options.get("do_sample"))
        penalise, truncate = _processors(options, PENALTIES), _processors(options, TRUNCATIONS if samples else {})
        return cls(settings["mask_token_id"], masks, kind != "threshold", value, samples, penalise, truncate)

    def read_logits(self, logits: Tensor, text: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Beliefs and scores, (positions, vocabulary); the mask token is in neither."""
        logits = logits.float()
        logits[:, self.mask] = -math.inf
        seen = torch.cat([text, drafts]).repeat(len(logits), 1)
        later = torch.ones_like(seen[:, len(text) :], dtype=torch.bool).triu()
        seen[:, len(text) :].masked_fill_(later, int(text[-1]))  # a token seen twice is penalised once
        beliefs = self.penalise(seen, logits)
        return beliefs, self.truncate(seen, beliefs) if self.samples else beliefs

    def noise(self, scores: Tensor, known: Tensor | None) -> Tensor:
        """For each score: what the drafts were drawn with, then fresh noise."""
        fresh = torch.zeros_like(scores)
        if self.samples:
            fresh = -torch.empty_like(scores).exponential_().log()
        return fresh if known is None else torch.cat([known, fresh[len(known) :]])

    def check(self, drafts: Tensor, choices: Tensor, beliefs: Tensor, scores: Tensor) -> int:
        """How many drafts pass, from the left: those that are the AR model's choice, or by δ close to it."""
        each = torch.arange(len(drafts), device=drafts.device)
        passes = drafts == choices[each]
        if self.value < 1 and len(drafts):
            close = (beliefs[each, drafts] - beliefs[each].amax(1)).exp() >= self.value
            passes |= close & (scores[each, drafts] > -math.inf)  # what truncation removed stays out
        return _leading(passes)

    def trusted(self, beliefs: Tensor) -> int:
        """How many guesses are emitted unchecked, from the left."""
        return _leading(beliefs.log_softmax(1).amax(1).exp() >= self.value)


def _leading(flags: Tensor) -> int:
    return int(flags.long().cumprod(0).sum())


def _processors(options: dict[str, Any], table: dict[str, tuple[Any, int]]) -> LogitsProcessorList:
    wanted = {name: options[name] for name, (_, off) in table.items() if options.get(name) not in (None, off)}
    return LogitsProcessorList([table[name][0](value) for name, value in wanted.items()])


def _parse(dial: str) -> tuple[str, float]:
    kind, _, number = dial.strip().partition("=")
    if kind.startswith("threshold:"):
        raise ValueError(
            f"the dial {dial} needs the mars package: here, threshold=τ asks for the top probability alone"
        )
    try:
        value = float(number or 1)
    except ValueError:
        value = math.nan
    takes_number = {"one-token": False, "exact": False, "relaxed": True, "threshold": True}
    if takes_number.get(kind) != bool(number) or not 0 <= value <= 1 or (kind == "relaxed" and value == 0):
        raise ValueError(
            f"unknown dial {dial!r}: use one-token, exact, relaxed=δ (0 < δ ≤ 1) or threshold=τ (0 ≤ τ ≤ 1)"
        )
    return kind, value


def _options(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the call asks for, else its generation config, else the checkpoint's, else transformers' default."""
    options: dict[str, Any] = {"top_k": 50}
    for source in (model.generation_config, config):
        if source is not None:
            options |= {name: value for name, value in source.to_dict().items() if value is not None}
    options |= kwargs
    refused = [name for name, value in options.items() if name not in KNOWN and not _is_off(name, value)]
    if refused:
        raise ValueError(
            f"MARS decoding does not support {', '.join(refused)}: switch that off, or decode with transformers alone "
            "by `type(model).generate(model, …)`"
        )
    return options


def _is_off(name: str, value: object) -> bool:
    if not isinstance(value, bool | int | float | str | list | dict):
        return value is None
    return value == OFF[name] if name in OFF else not value


def _limit(options: dict[str, Any], width: int) -> int:
    """Most tokens an answer may have. ``max_length`` counts the prompt with its padding, as in transformers."""
    limit, length = options.get("max_new_tokens"), options.get("max_length")
    if limit is None:
        limit = 20 if length is None else length - width
    if limit < 1:
        raise ValueError(f"no room for an answer behind {width} prompt tokens: raise max_new_tokens or max_length")
    return int(limit)


def _prompts(inputs: Tensor | None, input_ids: Tensor | None) -> Tensor:
    given = [each for each in (inputs, input_ids) if each is not None]
    if len(given) != 1 or given[0].ndim != 2 or not given[0].numel():
        raise ValueError("give the prompts once, as `inputs` or `input_ids`: token ids of shape (rows, tokens)")
    return given[0]


def _unpad(ids: Tensor, attention_mask: Tensor | None, padding: int | None, ends: list[int]) -> list[Tensor]:
    """The rows without padding; if there is no attention mask, that is the padding token where it ends no text."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask.bool()
    elif padding is not None and padding not in ends:
        mask = ids.ne(padding)
    if mask.shape != ids.shape or not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("attention_mask must have the prompts' shape, with the padding of each row at its left")
    return [row[kept] for row, kept in zip(ids, mask, strict=True)]


def _streamed(ids: Tensor, rows: list[Iterator[Tensor]], streamer: BaseStreamer) -> Iterator[Tensor]:
    if len(rows) != 1:
        raise ValueError("a streamer follows one row, not a batch")
    streamer.put(ids.cpu())
    for run in rows[0]:
        streamer.put(run.cpu())
        yield run
    streamer.end()
