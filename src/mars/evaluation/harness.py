"""The model class ``mars`` for EleutherAI's lm-eval; run as a module, this is lm-eval's command line with that class.

python -m mars.evaluation.harness run --model mars --model_args pretrained=MODEL,dial=exact --tasks gsm8k -b auto
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import Any

import torch
from jinja2 import TemplateError
from tqdm import tqdm

from mars.api import load
from mars.core.request import Request
from mars.errors import MarsError, how_to_install
from mars.evaluation.prompts import cut, encode, render_chat
from mars.method.acceptance import Dial
from mars.method.sampling import SamplingParams
from mars.method.windows import parse_window
from mars.models.attention import own_attention
from mars.models.builtin import NAME as DEFAULT_MODEL

try:  # lm_eval.models fills the registry, but only while it is empty: import it before ours is added
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import DEFAULT_MAX_LENGTH, handle_stop_sequences, normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise MarsError(f"lm-eval is needed ({error}): {how_to_install('eval')}") from None

ROWS = 64
BATCH_TOKENS = 4096  # most tokens of a forward over several texts to score
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""lm-eval's key of the request, the context, and the continuation to score"""

if "mars" not in model_registry:
    model_registry.register("mars", target="mars.evaluation.harness:MarsLM")


class MarsLM(TemplateLM):
    """A checkpoint as a model of lm-eval. With one-token and exact, the answers are those of lm-eval's class ``hf``."""

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        *,
        adapter: str | None = None,
        dial: str | None = None,
        window: str | None = None,
        block_size: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        rows: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        enable_thinking: bool | None = None,
        **unknown: Any,
    ) -> None:
        """``pretrained`` is what `mars.load` takes, ``dial``, ``window`` and ``block_size`` what `Model.request` does.

        ``rows`` requests run at once: by default ``batch_size`` if that is a number, else ``max_batch_size`` or 64.
        Texts of more than ``max_length`` tokens (default: the model's context) lose their beginning.
        ``enable_thinking`` goes to the chat template.
        """
        super().__init__()
        if unknown:
            raise MarsError(
                f"unknown model argument {next(iter(unknown))}: use pretrained, adapter, dial, window, block_size, "
                "dtype, device, rows, batch_size, max_length or enable_thinking"
            )
        size = str(batch_size)
        if batch_size is not None and not size.isdecimal() and size.partition(":")[0] != "auto":
            raise MarsError(f"batch_size must be a number or auto, not {batch_size!r}")
        given = (rows, int(size) if size.isdecimal() else None, max_batch_size, ROWS)
        rows = next(each for each in given if each is not None)
        for name, value in {"rows": rows, "block_size": block_size, "max_length": max_length}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise MarsError(f"{name} must be a whole number above 0, not {value!r}")
        if window is not None:
            parse_window(str(window), 1)
        if dial is not None:
            Dial.parse(dial)  # a typing mistake should not cost a download
        self._model = load(pretrained, adapter=adapter, device=_device(device), dtype=dtype, max_num_seqs=rows)
        self._checkpoint = self._model.checkpoint
        self._options: dict[str, Any] = {"dial": self._model.dial(dial), "window": window, "block_size": block_size}
        self._rows = rows
        self._template_options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._device = self._checkpoint.device
        self._tokens = self._forwards = 0
        self.tokenizer = self._checkpoint.tokenizer
        self.max_length = max_length or self._checkpoint.context or DEFAULT_MAX_LENGTH
        self.max_gen_toks = 256

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text; without the system's messages if the template refuses them."""
        if self.tokenizer.chat_template is None:
            raise MarsError(f"{self._checkpoint.name} has no chat template: leave out --apply_chat_template")
        try:
            return render_chat(self._checkpoint, chat_history, add_generation_prompt, **self._template_options)
        except TemplateError as error:
            rest = [each for each in chat_history if each["role"] != "system"]
            if len(rest) == len(chat_history):
                raise MarsError(
                    f"the chat template of {self._checkpoint.name} refuses the messages of this task: {error}"
                ) from error
            return self.apply_chat_template(rest, add_generation_prompt)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [self._ask(*each.args) for each in requests]
        texts = [""] * len(requests)
        with (
            tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar,
            closing(self._model.run([request for request, _ in asked])) as answers,
        ):
            for index, answer in answers:
                text = cut(self.tokenizer.decode(answer.token_ids, skip_special_tokens=True), asked[index][1])
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                self._tokens += answer.num_tokens
                self._forwards += answer.forwards
                texts[index] = text
                bar.update()
        return texts

    def _ask(self, context: str, given: dict[str, Any]) -> tuple[Request, list[str]]:
        """A request, and the strings at which its text ends."""
        options: dict[str, Any] = normalize_gen_kwargs(given, self.max_gen_toks)
        end = self.tokenizer.eos_token
        stops = handle_stop_sequences(options.pop("until"), eos=end)
        room = options.pop("max_gen_toks")
        if room >= self.max_length:
            raise MarsError(f"max_gen_toks must be less than max_length ({self.max_length}), not {room}")
        request = self._model.request(
            encode(self._checkpoint, context, room)[room - self.max_length :],
            max_new_tokens=room,
            stop=[stop for stop in stops if stop != end],  # the end token ends it anyway
            sampling=self._sampling(options),
            **self._options,
        )
        return request, stops

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        """The task's sampling options, else the checkpoint's own. lm-eval has seeded torch."""
        del options["do_sample"]
        if options.get("num_beams") == 1:
            del options["num_beams"]
        if unknown := options.keys() - set(SAMPLING):
            raise MarsError(f"the generation option {min(unknown)} is not supported: leave it out of gen_kwargs")
        config = self._checkpoint.module.generation_config
        own = {name: getattr(config, name, None) for name in SAMPLING[1:]}
        chosen = {name: value for name, value in (own | options).items() if value is not None}
        return SamplingParams(**chosen, seed=int(torch.randint(2**62, ())))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[list[Scored]] = []  # parts of the texts that fit the model; each token is predicted once
        for each in requests:
            tokens = self.tok_encode(*each.args)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows.append([(None, *make_disjoint_window(window)) for window in rolling])
        scores = iter(self._loglikelihood_tokens(list(chain(*windows)), disable_tqdm=disable_tqdm))
        totals = [sum(score for score, _ in islice(scores, len(each))) for each in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Logprob of each continuation, and whether it is the greedy one. Equal texts are computed once."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, (_name, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise MarsError(
                    f"a text to score has {len(continuation)} tokens, but max_length is {self.max_length}: "
                    "leave out its task"
                )
            whole = (context or [self.prefix_token_id]) + continuation
            sharing.setdefault(tuple(whole[-self.max_length - 1 : -1]), []).append(index)
        answers = [(0.0, True)] * len(requests)
        with (
            own_attention(self._checkpoint.module) as model,
            tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar,
        ):
            for texts in _batches(sorted(sharing, key=len, reverse=True), self._rows):
                width = len(texts[0])
                padded = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], device=self._device)
                first = min(len(text) - len(requests[index][2]) for text in texts for index in sharing[text])
                logits = model(padded, logits_to_keep=width - first).logits
                for text, row in zip(texts, logits, strict=True):
                    for index in sharing[text]:
                        name, _context, continuation = requests[index]
                        end = len(text) - first
                        found = row[end - len(continuation) : end]
                        wanted = torch.tensor(continuation, device=self._device)
                        logprobs = found.float().log_softmax(-1).gather(1, wanted[:, None])
                        answers[index] = float(logprobs.sum()), bool((found.argmax(-1) == wanted).all())
                        if name is not None:
                            self.cache_hook.add_partial("loglikelihood", name, answers[index])
                        bar.update()
        return answers

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval stores beside its results."""
        module = self._checkpoint.module
        return {
            "model_num_parameters": module.num_parameters(),
            "model_dtype": self._checkpoint.form,
            "dial": str(self._options["dial"]),
            "tokens_per_forward": self._tokens / self._forwards if self._forwards else None,
        }


def _device(name: str | None) -> torch.device | None:
    """None: the default. lm-eval asks for ``cuda`` unless told otherwise, even if there is no GPU."""
    try:
        device = None if name is None else torch.device(name)
    except RuntimeError:
        raise MarsError(f"unknown device {name!r}: use cpu or cuda") from None
    return None if device is not None and device.type == "cuda" and not torch.cuda.is_available() else device


def _batches(texts: Sequence[tuple[int, ...]], rows: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Texts that go through the model together. They must be sorted, longest first."""
    start = 0
    while start < len(texts):
        size = max(1, min(rows, BATCH_TOKENS // max(1, len(texts[start]))))
        yield texts[start : start + size]
        start += size


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except MarsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
