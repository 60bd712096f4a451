"""Chats to tokens: what each kind of chat template lets the assistant say, and templates that are turned away."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mars import MarsError
from mars.models.builtin import builtin_folder
from mars.training.chats import PROBE, Document, encode_chat

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>"]
SPECIAL += ["</turn>", "<|done|>", "<|channel|>"]

SMOLLM_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITHOUT_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = (
    "<|bos|>{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
GEMMA = (
    "<|bos|>{% if messages[0].role == 'system' %}{{ raise_exception('system is not a role here') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '</turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
MISTRAL = (  # no generation prompt; the system prompt moves on with the last user turn
    "<s>{% set hint = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.last = loop.index %}{% endfor %}"
    "{% set ns.user = 0 %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = ns.user + 1 %}"
    "{{ '[INST] ' + (hint if ns.user == ns.last else '') + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
THINKING = (  # thinking stays in the last answer only, and is put there if it has none
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content %}"
    "{% if loop.last %}{% set text = '<think>\n' + (thought or '') + '\n</think>\n\n' + text %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nOPENED' }}{% endif %}"
)
HARMONY = (  # an answer within the chat ends with another token than the last answer
    "{% for m in messages %}{{ '<|head|>' + m.role }}{% if m.role == 'assistant' %}"
    "{{ '<|channel|>final<|/head|>' + m.content + ('<|done|>' if loop.last else '<|eot|>') }}"
    "{% else %}{{ '<|/head|>' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
END_AT_THE_END = PLAIN + "{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}"


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


TWO_TURNS = chat("Where is Rome?", "Rome is in **Italy**.\n\nYes 🙂 it is.", "And Oslo?", "In Norway.")
ITALY, NORWAY = TWO_TURNS[1]["content"], TWO_TURNS[3]["content"]


@cache
def builtin() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builtin_folder())


def byte_level() -> PreTrainedTokenizerBase:
    """The built-in model's tokenizer with more special tokens."""
    tokenizer = deepcopy(builtin())
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return tokenizer


def trimmed_byte_level() -> PreTrainedTokenizerBase:
    """The Llama 3 way: spans without white space, and line breaks always apart from what follows."""
    tokenizer = byte_level()
    backend = tokenizer.backend_tokenizer
    split = pre_tokenizers.Split(Regex(r"\s*\n+|\s+(?!\S)| ?[^\s]+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def sentence_piece() -> PreTrainedTokenizerBase:
    """The Mistral way: white space belongs to the word behind it, rare letters are bytes, texts get a start token."""
    tokenizer = Tokenizer(tokenizer_models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", *alphabet], show_progress=False)
    tokenizer.train_from_iterator([message["content"] + " [INST] [/INST]" for message in TWO_TURNS] * 5, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    return builtin()


@pytest.fixture(scope="module", params=[byte_level, trimmed_byte_level, sentence_piece])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return request.param()


def said(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[str]:
    """The text of each unbroken run of the assistant's tokens, less the space before it, which some decoders drop."""
    assert len(document.tokens) == len(document.assistant)
    runs = groupby(zip(document.assistant, document.tokens, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]).removeprefix(" ") for marked, run in runs if marked]


def starts(document: Document) -> list[int]:
    marks = [False, *document.assistant]
    return [index for index in range(len(document.tokens)) if marks[index + 1] and not marks[index]]


def prompts(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[list[int]]:
    """What a model is given before each answer."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return [tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"] for turn in turns]


# --- the built-in model


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_smollm2(smollm2: PreTrainedTokenizerBase, system: str | None) -> None:
    messages = chat(*(message["content"] for message in TWO_TURNS), system=system)
    document = encode_chat(smollm2, messages)
    assert document.tokens == smollm2.apply_chat_template(messages)["input_ids"]
    assert smollm2.decode(document.tokens).startswith(SMOLLM_SYSTEM) == (system is None)
    assert said(smollm2, document) == [f"{ITALY}<|im_end|>", f"{NORWAY}<|im_end|>"]
    assert [document.tokens[:start] for start in starts(document)] == prompts(smollm2, messages)
    assert not document.assistant[-1]  # the newline behind the end token


known = st.characters(codec="utf-8", min_codepoint=0x20, max_codepoint=0xFFFF, exclude_characters="<\x7f")
letters = known | st.sampled_from("\n\t ")  # a few rarer bytes are not in this vocabulary
words = st.text(letters, min_size=1).filter(lambda text: not text[0].isspace())


@settings(deadline=None)
@example([PROBE, f"{PROBE}e"])
@given(st.lists(words, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_any_words_are_marked_whole(smollm2: PreTrainedTokenizerBase, texts: list[str]) -> None:
    document = encode_chat(smollm2, chat(*texts))
    assert said(smollm2, document) == [f"{text}<|im_end|>" for text in texts[1::2]]
    assert [document.tokens[:start] for start in starts(document)] == prompts(smollm2, chat(*texts))


def test_the_assistants_words_elsewhere_are_not_taken_for_its_own(smollm2: PreTrainedTokenizerBase) -> None:
    messages = chat("assistant\nRome", "Rome", "Rome", "Rome", system="Rome")
    document = encode_chat(smollm2, messages)
    assert said(smollm2, document) == ["Rome<|im_end|>"] * 2
    assert [document.tokens[:start] for start in starts(document)] == prompts(smollm2, messages)


def test_white_space_that_melts_into_the_header_is_left_out(smollm2: PreTrainedTokenizerBase) -> None:
    assert said(smollm2, encode_chat(smollm2, chat("Hi", "\n  Hello"))) == ["Hello<|im_end|>"]


def test_two_answers_in_a_row(smollm2: PreTrainedTokenizerBase) -> None:
    messages = [*chat("Hi", "Hello."), {"role": "assistant", "content": "Well?"}]
    assert said(smollm2, encode_chat(smollm2, messages)) == ["Hello.<|im_end|>", "Well?<|im_end|>"]


# --- templates


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (CHATML_WITHOUT_PROMPT, "<|im_end|>"), (LLAMA, "<|eot|>"), (GEMMA, "</turn>")],
    ids=["chatml", "chatml without prompt", "llama", "gemma"],
)
def test_end_tokens(tokenizer: PreTrainedTokenizerBase, template: str, end: str) -> None:
    tokenizer.chat_template = template
    document = encode_chat(tokenizer, TWO_TURNS)
    assert said(tokenizer, document) == [ITALY + end, NORWAY + end]


@pytest.mark.parametrize("template", [CHATML, LLAMA, GEMMA], ids=["chatml", "llama", "gemma"])
@pytest.mark.parametrize("kind", [trimmed_byte_level, sentence_piece])
def test_answers_follow_the_very_prompt_a_model_is_given(kind, template: str) -> None:
    tokenizer = kind()
    tokenizer.chat_template = template
    document = encode_chat(tokenizer, TWO_TURNS)
    assert [document.tokens[:start] for start in starts(document)] == prompts(tokenizer, TWO_TURNS)


@pytest.mark.parametrize("template", [LLAMA, GEMMA], ids=["llama", "gemma"])
def test_trimmed_answers(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    tokenizer.chat_template = template
    (text,) = said(tokenizer, encode_chat(tokenizer, chat("Hi", "\n In Norway. \n")))
    assert text.startswith("In Norway.<")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_mistral(tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
    """With a system prompt the first answer's own prompt is not in the full chat."""
    tokenizer.chat_template = MISTRAL
    messages = chat(*(message["content"] for message in TWO_TURNS), system=system)
    document = encode_chat(tokenizer, messages)
    assert said(tokenizer, document) == [f"{ITALY} </s>", f"{NORWAY} </s>"]
    given = [document.tokens[:start] for start in starts(document)]
    assert (given[0] == prompts(tokenizer, messages)[0]) == (system is None)
    assert given[1] == prompts(tokenizer, messages)[1]


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_thinking(opened: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = THINKING.replace("OPENED", opened.replace("\n", "\\n"))
    thoughtful = chat("2+2?", "<think>\nEasy.\n</think>\n\nFour.", "3+3?", "<think>Hm.</think>Six.")
    if opened.endswith("</think>\n\n"):  # the last answer thinks, its prompt says that it has thought
        with pytest.raises(MarsError, match="message 4"):
            encode_chat(tokenizer, thoughtful)
    else:
        last = "<think>\nHm.\n</think>\n\nSix.<|im_end|>".removeprefix(opened)
        assert said(tokenizer, encode_chat(tokenizer, thoughtful)) == ["Four.<|im_end|>", last]
    thoughtless = said(tokenizer, encode_chat(tokenizer, chat("2+2?", "Four.", "3+3?", "Six.")))
    assert thoughtless[0] == "Four.<|im_end|>"
    assert thoughtless[1] == "<think>\n\n</think>\n\nSix.<|im_end|>".removeprefix(opened)


def test_an_end_token_that_only_the_last_answer_has(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = HARMONY
    spoken = said(tokenizer, encode_chat(tokenizer, TWO_TURNS))
    assert spoken == [f"<|channel|>final<|/head|>{ITALY}", f"<|channel|>final<|/head|>{NORWAY}<|done|>"]
    tokenizer.chat_template = END_AT_THE_END
    first, last = said(tokenizer, encode_chat(tokenizer, TWO_TURNS))
    assert (first.rstrip("\n"), last) == (ITALY, f"{NORWAY}\n\n</s>")


def test_a_space_that_ends_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = HARMONY.replace("'<|head|>' + m.role", "'<|head|>' + m.role + ' '").replace(
        "'<|head|>assistant'", "'<|head|>assistant '"
    )
    document = encode_chat(tokenizer, TWO_TURNS)
    assert document.tokens[: starts(document)[0]] == prompts(tokenizer, TWO_TURNS)[0]


def test_a_header_that_the_prompt_leaves_out_is_not_said(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = END_AT_THE_END.replace("{{ 'assistant:' }}", "")
    first, last = said(tokenizer, encode_chat(tokenizer, TWO_TURNS))
    assert (first.rstrip("\n"), last) == (ITALY, f"{NORWAY}\n\n</s>")


def test_a_template_without_end_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = PLAIN
    assert [text.rstrip("\n") for text in said(tokenizer, encode_chat(tokenizer, TWO_TURNS))] == [ITALY, NORWAY]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (MISTRAL, " </s>"), (END_AT_THE_END, ""), (PLAIN, "")],
    ids=["chatml", "mistral", "end at the end", "plain"],
)
def test_a_last_answer_that_was_cut_off_has_no_end(tokenizer: PreTrainedTokenizerBase, template: str, end: str) -> None:
    tokenizer.chat_template = template
    document = encode_chat(tokenizer, TWO_TURNS, ended=False)
    first, last = said(tokenizer, document)
    assert document.assistant[-1]
    assert (first.rstrip("\n"), last.rstrip("\n")) == (ITALY + end, NORWAY)


# --- refusals


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, TWO_TURNS, "instruct model"),
        (CHATML, chat("Hi"), "no assistant turn"),
        (CHATML, chat("Hi", "Hello.")[1:], "starts with the assistant"),
        (CHATML, chat("Hi", " "), "message 2"),
        (CHATML, chat("Hi", "Hello.<|im_end|>Bye."), "token that ends it"),
        (GEMMA, chat("Hi", "Hello.", system="Be brief."), "system is not a role here"),
        (GEMMA, [*chat("Hi", "Hello."), *chat("Hi", "Hello.")[1:]], "roles must alternate"),
        ("{% for m in messages %}{{ m.content | upper }}\n{% endfor %}", chat("Hi", "Hello."), "message 2"),
        ("{% for m in messages %}{{ m.content ~ m.content }}\n{% endfor %}", chat("Hi", "a" * 12), "message 2"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", chat("Hi", "Hello."), "message 2"),
        (PLAIN.replace(": '", ":'"), chat("Hi", ":"), "shares its only token"),
        ("{{ messages | tojson }}", chat("Hi", 'Say "hello".'), "message 2"),
    ],
)
def test_refusals(template: str | None, messages: list[dict[str, str]], reason: str) -> None:
    tokenizer = deepcopy(builtin())
    tokenizer.chat_template = template
    with pytest.raises(MarsError, match=reason):
        encode_chat(tokenizer, messages)


def test_a_tokenizer_that_does_not_tell_where_tokens_lie() -> None:
    with pytest.raises(MarsError, match=r"tokenizer\.json"):
        encode_chat(ByT5Tokenizer(chat_template=CHATML), TWO_TURNS)
