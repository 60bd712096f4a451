"""lm-eval over our engine: the answers and scores of its own class ``hf``, at every dial."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from tokenizers.processors import TemplateProcessing

import mars
from mars.errors import MarsError
from mars.evaluation.prompts import cut, encode
from mars.models import save_checkpoint
from tests.conftest import CHAT_TEMPLATE, MASK, save_chat_model, tiny_checkpoint

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mars.evaluation import harness
from mars.evaluation.harness import MarsLM

BEGIN = "j"
LONG = "abcdefghi" * 40
TASK = """
task: letters
custom_dataset: !function rows.load
test_split: test
fewshot_split: test
num_fewshot: 1
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
output_type: generate_until
generation_kwargs: {until: [cd], max_gen_toks: 20}
metric_list: [{metric: exact_match}]
"""
ROWS = """
from datasets import Dataset

def load(**_):
    rows = [{"question": text, "answer": text[-2:]} for text in ("abcde", "ghi", "dddcba", "fghia")]
    return {"test": Dataset.from_list(rows)}
"""


def save(folder: Path, family: str) -> str:
    """A random model of ten letters, one token each, whose texts begin with one of them."""
    checkpoint = tiny_checkpoint(family)
    tokenizer = checkpoint.tokenizer
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.bos_token = BEGIN
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|."), "isolated")
    backend.post_processor = TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 9)])
    checkpoint.module.generation_config.suppress_tokens = [MASK]  # ours never writes it
    save_checkpoint(checkpoint, folder)
    return str(folder)


@pytest.fixture(scope="module", params=["llama", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "tiny", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a task that shows one example."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.py").write_text(ROWS)
    (folder / "letters.yaml").write_text(TASK)
    return folder / "letters.yaml"


def theirs(folder: str, **options: object) -> HFLM:
    return HFLM(pretrained=folder, device="cpu", dtype="float32", **options)


def ours(folder: str, **options: object) -> MarsLM:
    return MarsLM(folder, device="cpu", dtype="float32", **options)


def asked(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def questions(**options: object) -> list[Instance]:
    """Of different lengths; one brings its beginning, one is too long."""
    given = {"do_sample": False, "until": ["ab", "ed"], "max_gen_toks": 40, **options}
    texts = ("abc", "ghiabcadef", "d", "hgfedcbaabc", LONG, "bbbbbb", "fa")
    return asked("generate_until", *((text, given) for text in texts))


def test_the_same_answers(folder: str) -> None:
    for requests in (questions(), questions(until=[]), questions(until="a", max_gen_toks=9)):
        expected = theirs(folder, batch_size=3).generate_until(requests, disable_tqdm=True)
        assert len(set(expected)) > 3
        for dial in ("one-token", "exact"):
            assert ours(folder, dial=dial, batch_size="2").generate_until(requests, disable_tqdm=True) == expected


def test_a_beginning_is_not_doubled(llama: str) -> None:
    requests = asked("generate_until", *((text, {"max_gen_toks": 30}) for text in (BEGIN + "abc", "abc")))
    texts = ours(llama, dial="one-token").generate_until(requests, disable_tqdm=True)
    assert texts == theirs(llama, batch_size=1).generate_until(requests, disable_tqdm=True)
    assert texts[0] == texts[1]


def test_the_same_likelihoods(folder: str) -> None:
    pairs = [(context, letter) for context in ("abc", "ghia", "dd") for letter in "abcdefghij"]
    others = [
        ("abc", "ef"),
        ("ab", "ce"),
        ("", "abc"),
        ("", BEGIN + "b"),
        (LONG, "ghi"),
        ("dd ", "ef"),
        ("a", LONG[:60]),
    ]
    requests = asked("loglikelihood", *pairs, *others)
    # with its cache, it misreads continuations of different lengths behind the same text
    plain = theirs(folder, batch_size=2, max_length=60, logits_cache=False)
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    found = ours(folder, batch_size=3, max_length=60).loglikelihood(requests, disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert [best for _, best in found] == [best for _, best in expected]
    assert 0 < sum(best for _, best in found) <= 3


def test_the_same_likelihoods_of_long_texts(folder: str) -> None:
    requests = asked("loglikelihood_rolling", (LONG,), ("abc",), ("",), (LONG[:59],))
    expected = theirs(folder, batch_size=2, max_length=60).loglikelihood_rolling(requests, disable_tqdm=True)
    found = ours(folder, batch_size=2, max_length=60).loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-4)


def test_answers_are_kept_as_they_come(llama: str) -> None:
    kept = []
    model = ours(llama)
    model.set_cache_hook(SimpleNamespace(add_partial=lambda *each: kept.append(each)))
    requests = questions()
    texts = model.generate_until(requests, disable_tqdm=True)
    assert sorted(map(str, kept)) == sorted(
        str(("generate_until", request.args, text)) for request, text in zip(requests, texts, strict=True)
    )
    kept.clear()
    score = model.loglikelihood_rolling(asked("loglikelihood_rolling", ("abc",)), disable_tqdm=True)
    answer = model.loglikelihood(asked("loglikelihood", ("abc", "d")), disable_tqdm=True)
    assert kept == [("loglikelihood_rolling", ("abc",), score[0]), ("loglikelihood", ("abc", "d"), answer[0])]


def test_dials_and_windows(llama: str) -> None:
    trusting = ours(llama, dial="threshold=0.2", block_size=3)
    trusting.generate_until(questions(until=[]), disable_tqdm=True)
    info = trusting.get_model_info()
    assert (info["dial"], info["tokens_per_forward"] > 1) == ("threshold=0.2", True)
    own = ours(llama, window="tree=2", rows=3, batch_size=1)
    assert own.get_model_info()["dial"] == "exact"
    expected = ours(llama, dial="one-token", batch_size="auto:4", max_batch_size=2).generate_until(questions())
    assert own.generate_until(questions(), disable_tqdm=True) == expected


def test_sampling_follows_the_seed(llama: str) -> None:
    model = ours(llama, dial="one-token")
    requests = questions(do_sample=True, temperature=0.9, top_p=0.95, top_k=8, min_p=0.01, num_beams=1, until=[])
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate_until(requests, disable_tqdm=True))
    assert texts[0] == texts[1] != texts[2]


def test_a_penalty_of_the_checkpoint_counts(tmp_path: Path) -> None:
    source = save(tmp_path / "tiny", "llama")
    path = tmp_path / "tiny" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.3}))
    expected = theirs(source, batch_size=1).generate_until(questions(until=[]), disable_tqdm=True)
    for dial in ("one-token", "exact"):
        assert ours(source, dial=dial).generate_until(questions(until=[]), disable_tqdm=True) == expected


def test_a_task_with_examples_in_a_chat(llama: str, task: Path) -> None:
    manager = TaskManager(include_defaults=False, include_path=str(task.parent))
    results = [
        lm_eval.simple_evaluate(
            model,
            tasks=["letters"],
            task_manager=manager,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            bootstrap_iters=0,
        )
        for chat in (False, True)
        for model in (theirs(llama, batch_size=2), ours(llama, dial="exact"))
    ]
    samples = [
        [(each["arguments"], each["resps"], each["exact_match"]) for each in result["samples"]["letters"]]
        for result in results
    ]
    assert samples[0] == samples[1]
    assert samples[2] == samples[3] != samples[0]
    assert results[3]["config"]["dial"] == "exact"


def test_templates_that_refuse(llama: str) -> None:
    model = ours(llama)
    assert model.chat_template(True) == CHAT_TEMPLATE
    model.tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    )
    chat = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de"}]
    assert model.apply_chat_template(chat) == "de"
    with pytest.raises(MarsError, match="refuses the messages of this task: no system"):
        model.apply_chat_template([{"role": "assistant", "content": "abc"}])
    model.tokenizer.chat_template = None
    with pytest.raises(MarsError, match="leave out --apply_chat_template"):
        model.apply_chat_template(chat)


def test_the_command_line(llama: str, task: Path, tmp_path: Path) -> None:
    """lm-eval's own, with its own way to read arguments. It knows our class and has not forgotten its own."""
    assert get_model("mars") is MarsLM
    assert "hf" in model_registry
    command = [sys.executable, "-m", "mars.evaluation.harness", "run", "--model", "mars", "--tasks", str(task)]
    arguments = ["--model_args", f"pretrained={llama},dial=threshold=0.2", "--batch_size", "auto"]
    done = subprocess.run(
        [*command, *arguments, "--output_path", str(tmp_path / "out"), "--log_samples"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "letters" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["n-samples"]["letters"]["effective"] == 4
    assert results["config"]["dial"] == "threshold=0.2"
    assert results["config"]["tokens_per_forward"] > 1


def test_the_command_line_explains_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: MarsLM(str(tmp_path / "nowhere")))
    with pytest.raises(SystemExit, match=f"error: there is no folder {tmp_path}/nowhere"):
        harness.main()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dial": "fast"}, "fast"),
        ({"window": "wide"}, "unknown window 'wide'"),
        ({"rows": "many"}, "rows must be a whole number above 0, not 'many'"),
        ({"batch_size": 0}, "rows must be a whole number above 0, not 0"),
        ({"batch_size": "large"}, "batch_size must be a number or auto, not 'large'"),
        ({"max_length": -1}, "max_length must be a whole number above 0"),
        ({"block_size": 2.5}, "block_size must be a whole number above 0"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
        ({"device": "abacus"}, "unknown device 'abacus': use cpu or cuda"),
        ({"parallelize": True}, "unknown model argument parallelize: use pretrained,"),
    ],
)
def test_bad_model_arguments(llama: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(MarsError, match=message):
        MarsLM(llama, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "the generation option num_beams is not supported: leave it out of gen_kwargs"),
        ({"max_length": 40}, "the generation option max_length is not supported"),
        ({"top_p": 2}, "top_p must be above 0 and at most 1"),
        ({"top_p": "high"}, "top_p must be a finite number, not 'high'"),
        ({"max_gen_toks": 256}, r"max_gen_toks must be less than max_length \(256\), not 256"),
    ],
)
def test_bad_generation_options(llama: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(MarsError, match=message):
        ours(llama).generate_until(questions(**options), disable_tqdm=True)


def test_bad_texts_and_models(llama: str, chat_model: Path) -> None:
    with pytest.raises(MarsError, match="a text to score has 9 tokens, but max_length is 8"):
        ours(llama, max_length=8).loglikelihood(asked("loglikelihood", ("a", "bcdefghia")), disable_tqdm=True)
    with pytest.raises(MarsError, match="exact"):
        ours(str(chat_model), dial="exact")


def test_a_gpu_that_is_not_there(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert MarsLM(llama, device="cuda:0").device.type == "cpu"


def test_generation_stops_when_its_caller_does(tmp_path: Path) -> None:
    model = mars.load(save_chat_model(tmp_path / "tiny", trained=True), device="cpu", max_num_seqs=3)
    prompts = [[1, number % 9, number // 9] for number in range(70)]
    requests = [model.request(prompt, max_new_tokens=12) for prompt in prompts]
    expected = model.generate(prompts, max_new_tokens=12)
    found = dict(model.run(requests))
    assert [found[index].token_ids for index in range(70)] == [answer.token_ids for answer in expected]
    answers = model.run(requests)
    assert len(list(islice(answers, 5))) == 5
    answers.close()
    assert (model.engine().num_running, model.engine().num_waiting) == (0, 0)
    with pytest.raises(MarsError, match="max_new_tokens"):
        next(model.run([*requests, model.request([1], max_new_tokens=0)]))
    assert not list(model.run([]))


def test_prompts_and_ends(llama: str) -> None:
    checkpoint = mars.load(llama, device="cpu").checkpoint
    assert encode(checkpoint, "abc", 10) == encode(checkpoint, BEGIN + "abc", 10) == [9, 0, 1, 2]
    assert encode(checkpoint, LONG, 250) == encode(checkpoint, LONG, 0)[-6:]
    with pytest.raises(MarsError, match="256 new tokens leave no room for a prompt in the 256"):
        encode(checkpoint, "abc", 256)
    assert cut("abcabd", ["", "bd", "ca"]) == "ab"
