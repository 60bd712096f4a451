"""Decode several tokens per forward with a model trained by MARS. Needs torch, transformers and safetensors only.

    folder = "…"  # of this checkpoint, or its name on the hub; a string, for transformers knows no other
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generate(**inputs, custom_generate=folder, trust_remote_code=True, dial="exact", max_new_tokens=200)

or, if the model itself was loaded with ``trust_remote_code=True``, just ``model.generate(**inputs, dial="exact")``.

The model has learned to read mask tokens: given ``… x M M M``, its ordinary next-token logits at ``x`` and at the three
masks predict the next four tokens. The first of the four is the prediction of the autoregressive (AR) model itself; the
other three are drafts. The masks' part is in the weights, or in a gated adapter in the folder ``mars`` of the
checkpoint, which acts at masks alone: then the AR model is the base model itself. It hooks into the model for the time
of a call. The *dial* says what becomes of the drafts:

``one-token``    no masks: the AR model
``exact``        the next forward feeds the drafts, which tells what the AR model would have written in their place, and
                 emits those that are the same. The text or the distribution is the AR model's, up to rounding.
``relaxed=δ``    a draft is also accepted if the AR model gives it at least δ times its top probability
``threshold=τ``  drafts are emitted unchecked, from the left, while the top probability of their mask is at least τ

A forward thus feeds a window ``text that is not cached yet | drafts | masks``. It verifies the drafts, yields the AR
model's own token behind the accepted ones, and, if all of them were accepted, the next drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from mars.method.acceptance import Decision, Dial, DialTensors, decide
from mars.method.markov import MarkovHead
from mars.method.sampling import SamplingParams, SamplingTensors
from mars.method.windows import Window, build_windows
from mars.models.adapter_files import find_adapter, read_adapter
from mars.models.gated import GatedAdapter

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
ENDING = ("max_new_tokens", "max_length", "eos_token_id", "pad_token_id")
SUPPORTED = {"mars", "dial", "adapter", "do_sample", *ENDING, *SAMPLING}
WITHOUT_EFFECT = {"bos_token_id", "use_cache", "trust_remote_code", "transformers_version", "_from_model_config"}
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

    ``dial``: ``one-token``, ``exact``, ``relaxed=0.3`` or ``threshold=0.9``; by default the checkpoint's own.
    ``adapter``: the folder or hub id of a gated adapter, for a base model that was loaded from elsewhere. The other
    options are transformers', with its defaults: max_new_tokens, max_length, eos_token_id, pad_token_id, do_sample,
    temperature, top_k, top_p, min_p, repetition_penalty. Whatever else is switched on is refused.

    Rows are decoded one after the other. What the call took is left in ``model.mars_statistics``: a dictionary with
    ``tokens``, ``forwards`` and ``tokens_per_forward``, over all rows.
    """
    options = _options(model, generation_config, kwargs)
    ids = _prompts(inputs, input_ids)
    limit = _limit(options, ids.shape[1])
    ends = [] if options.get("eos_token_id") is None else torch.as_tensor(options["eos_token_id"]).flatten().tolist()
    padding = options.get("pad_token_id")
    prompts = _unpad(ids, attention_mask, padding, ends)
    with _adapted(model, options) as (settings, head):
        method = Method.of(options, settings, head)
        rows = [_decode(model, prompt, limit, ends, method) for prompt in prompts]
        if streamer is not None:
            rows = [_streamed(ids, rows, streamer)]
        runs = [list(row) for row in rows]
    tokens, forwards = sum(len(run) for row in runs for run in row), sum(map(len, runs))
    model.mars_statistics = {"tokens": tokens, "forwards": forwards, "tokens_per_forward": tokens / forwards}
    filler = padding if padding is not None else ends[0] if ends else 0
    return torch.cat([ids, pad_sequence([torch.cat(row) for row in runs], True, filler)], 1)


_ADAPTERS: WeakKeyDictionary[PreTrainedModel, tuple[object, dict[str, Any], GatedAdapter]] = WeakKeyDictionary()
"""The adapter that a model was last called with, its config, and what it was read for"""


@contextmanager
def _adapted(model: PreTrainedModel, options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], MarkovHead | None]]:
    """The settings of the checkpoint, and its gated adapter in the model for the time of the context, if it has one."""
    settings, named = options.get("mars"), options.get("adapter")
    if isinstance(settings, dict) and named is None:
        yield settings, None
        return
    settings, adapter = _gated_adapter(model, None if named is None else str(Path(named).expanduser()))
    adapter.attach(model)
    try:
        yield settings, adapter.head
    finally:
        adapter.detach()


def _gated_adapter(model: PreTrainedModel, named: str | None) -> tuple[dict[str, Any], GatedAdapter]:
    """The config and the gated adapter by this name, by default the one beside the model's own files."""
    name, revision = named or model.name_or_path, None if named else getattr(model.config, "_commit_hash", None)
    like = model.get_input_embeddings().weight
    wanted = (name, revision, like.device, like.dtype)
    if model in _ADAPTERS and _ADAPTERS[model][0] == wanted:
        return _ADAPTERS[model][1:]
    files = find_adapter(name, revision) if name else None
    if files is None and named:
        raise ValueError(f"there is no gated adapter in {named}: it has no folder mars")
    if files is None:
        raise ValueError(
            "this model has no MARS settings, neither under `mars` in generation_config.json nor in a folder mars "
            f"beside its files ({name or 'which are unknown'}): pass the folder or hub id of an adapter as `adapter`"
        )
    adapter = read_adapter(files, model)
    adapter.detach()
    _ADAPTERS[model] = wanted, files.config, adapter
    return files.config, adapter


def _decode(model: PreTrainedModel, prompt: Tensor, limit: int, ends: list[int], method: Method) -> Iterator[Tensor]:
    """Continue one prompt; yields the tokens that each forward emits."""
    cache = DynamicCache()  # made without a config, sliding layers keep their whole past, so it can be rolled back
    text, drafts, noise = prompt, prompt[:0], dict[int, Tensor]()
    while room := limit + len(prompt) - len(text):
        masks = max(0, min(method.masks, room - 1 - len(drafts)))
        window = Window(len(drafts), int(masks > 0), masks)
        decision = _decide(model, cache, text, drafts, window, method, noise)
        accepted = int(decision.accepted)
        run = torch.cat([drafts[:accepted], decision.token])[:room]
        cache.crop(len(text) + accepted - cache.get_seq_length())  # negative: drop masks and rejected drafts
        drafts = decision.drafts[0, : int(decision.draft_count)]
        if not method.dial.verifies:
            run, drafts = torch.cat([run, drafts[: int(decision.trusted)]]), drafts[:0]
        stops = torch.isin(run, run.new_tensor(ends)).nonzero()
        yield run[: int(stops[0]) + 1] if len(stops) else run
        if len(stops):
            return
        text = torch.cat([text, run])


def _decide(
    model: PreTrainedModel,
    cache: DynamicCache,
    text: Tensor,
    drafts: Tensor,
    window: Window,
    method: Method,
    noise: dict[int, Tensor],
) -> Decision:
    """Feed a window behind the text that is not cached yet, and decide from its logits."""
    one = torch.ones(1, dtype=torch.long, device=text.device)
    windows = build_windows(
        window,
        method.mask,
        last=text[-1:],
        drafts=drafts[None],
        draft_count=one * len(drafts),
        emitted=one < 0,
        groups=one,
        masks=one * window.masks,
    )
    fed = torch.cat([text[cache.get_seq_length() : -1], windows.tokens[0]])[None]
    output = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=window.width)
    logits = output.logits[0, -window.width :].to(text.device)
    banned = method.mask if method.mask < logits.shape[1] else None  # a gated adapter's mask token has no logit
    made = SamplingTensors.of([method.sampling], logits.shape[1], banned, text.device)
    sampling = TorchSampling(**{name: getattr(made, name) for name in SamplingTensors.__slots__}, noise=noise)
    history = dict[str, Any]()
    if method.sampling.penalises:
        seen = torch.zeros(1, logits.shape[1], dtype=torch.bool, device=text.device)
        seen[0, text] = True
        history = {"seen": seen, "counts": torch.zeros_like(seen, dtype=torch.float)}
    dials = DialTensors.of([method.dial], text.device)
    here = one * len(text) - 1
    return decide(windows, logits, dials, sampling, positions=here, emitted=one < 0, head=method.head, **history)


@dataclass(frozen=True, slots=True)
class TorchSampling(SamplingTensors):
    """Samples with noise from torch's generator, so that `torch.manual_seed` repeats a text.

    A position keeps its noise: a draft is sampled with the noise that its verification will use.
    """

    noise: dict[int, Tensor] = field(default_factory=dict)

    def noisy(self, scores: Tensor, positions: Tensor) -> Tensor:
        if self.features.greedy or not positions.numel():
            return scores
        return scores + torch.stack([self._noise(at, scores[0, 0]) for at in positions[0].tolist()])

    def _noise(self, position: int, like: Tensor) -> Tensor:
        if position not in self.noise:
            self.noise[position] = -torch.empty_like(like).exponential_().log()
        return self.noise[position]


@dataclass(frozen=True)
class Method:
    """How a call decodes."""

    mask: int
    masks: int
    dial: Dial
    sampling: SamplingParams
    head: MarkovHead | None

    @classmethod
    def of(cls, options: dict[str, Any], settings: dict[str, Any], head: MarkovHead | None) -> Method:
        if not {"mask_token_id", "block_size"} <= settings.keys():
            raise ValueError("the MARS settings of this checkpoint lack mask_token_id or block_size")
        dial = Dial.parse(str(options.get("dial") or settings.get("dial", "exact")))
        given = {name: options[name] for name in SAMPLING if options.get(name) is not None}
        sampling = SamplingParams(**{"temperature": 1.0} | given, seed=0)
        if not options.get("do_sample"):
            sampling = SamplingParams(repetition_penalty=sampling.repetition_penalty, seed=0)
        masks = settings["block_size"] - 1 if dial.uses_masks else 0
        return cls(settings["mask_token_id"], masks, dial, sampling, head)


def _options(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the call asks for, else its generation config, else the checkpoint's, else transformers' default."""
    options: dict[str, Any] = {"top_k": 50}
    for source in (model.generation_config, config):
        if source is not None:
            options |= {name: value for name, value in source.to_dict().items() if value is not None}
    options |= kwargs
    refused = [
        name for name, value in options.items() if name not in SUPPORTED | WITHOUT_EFFECT and not _is_off(name, value)
    ]
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
