"""The benchmarks of the paper: their names in lm-eval, and the local files their rows may come from.

Of GPQA and GSM8K there are two forms: ours, and under names of their own those of the paper's scripts.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Benchmark:
    title: str
    task: str  # lm-eval's name of the task, or of a group of tasks
    score: str  # the metric that counts, and the filter of the answer it is computed from
    file: str  # name of the local file, without its suffix
    columns: tuple[str, ...]
    parts: str | None = None  # the column that says to which task of the group a row belongs
    shots: int | None = 0  # examples before the question; None: those that are part of the task
    is_private: bool = False  # do its authors ask that questions and choices be not shown?
    form_of: str | None = None  # another benchmark, of which this is the form that the paper's scripts ask


BENCHMARKS = {
    "ifeval": Benchmark(
        "IFEval", "ifeval", "prompt_level_strict_acc,none", "ifeval", ("key", "prompt", "instruction_id_list", "kwargs")
    ),
    "bbh": Benchmark(
        "BBH", "bbh_cot_fewshot", "exact_match,get-answer", "bbh", ("task", "input", "target"), parts="task", shots=None
    ),
    "mmlu_pro": Benchmark(
        "MMLU-Pro",
        "mmlu_pro",
        "exact_match,custom-extract",
        "mmlu_pro_test",
        ("question", "options", "answer", "answer_index", "category"),
        parts="category",
    ),
    "gpqa": Benchmark(
        "GPQA",
        "gpqa_diamond_cot_zeroshot",
        "exact_match,flexible-extract",
        "gpqa_diamond",
        ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        is_private=True,
    ),
    "gsm8k": Benchmark(
        "GSM8K", "gsm8k_cot_zeroshot", "exact_match,flexible-extract", "gsm8k_test", ("question", "answer")
    ),
    "humaneval": Benchmark(
        "HumanEval", "humaneval_instruct", "pass@1,none", "humaneval", ("prompt", "test", "entry_point")
    ),
}
ALL = tuple(BENCHMARKS)
"""What is asked where no benchmark is named"""

_GPQA, _GSM8K = (replace(BENCHMARKS[name], form_of=name) for name in ("gpqa", "gsm8k"))
BENCHMARKS |= {
    "gpqa_main": replace(_GPQA, title="GPQA main", task="gpqa_main_cot_zeroshot", file="gpqa_main"),
    "gsm8k_cot": replace(_GSM8K, title="GSM8K CoT", task="gsm8k_cot"),
    "gsm8k_cot_5": replace(_GSM8K, title="GSM8K CoT, 5-shot", task="gsm8k_cot", shots=5),
}
