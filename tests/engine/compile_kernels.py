"""Compile kernels for GPUs that are not here: run by a test.

They have to fit. Of the batch-invariant ones, what one layer runs for other numbers of tokens has to use one kind of
tensor core instruction, and to divide what it sums among threads in one way, since another may sum in another order.
"""

import re
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mars.engine.kernels import attention, invariant_attention, layers, markov, products

SHARED = {80: 163, 89: 99, 90: 227}  # KiB that a program may have, by compute capability
LONG = {"tokens", "items", "rows", "table", "slots", "cursors", "reach", "positions", "lengths", "before"}
FLOATS = {"part_mixed", "part_most", "part_total", "peaks", "masses"}
NUMBERS = {"scale": "fp32", "epsilon": "fp32", "mask_token": "i64"}
COUNTS = {"query_head", "query_token", "key_head", "key_token", "value_head", "value_token", "new_head", "new_token"}
COUNTS |= {"num_tokens", "rank", "splits", "most_parts", "last_position", "masks"}
EVEN = {"inputs", "outputs", "set_size", "part_size", "stride", "table_slot"}  # multiples of 16
ROW = {"SIZE": 576, "SIZE_UP": 1024}
ROTARY = {"WIDTH": 7, "HEADS": 28, "SHARED": 4, "ALL_UP": 64, "SIZE": 128, "HALF_UP": 64, "PAGE": 16}
ATTENTION = {"HEADS": 4, "FOLDS": 7, "SIZE": 128, "SIZE_UP": 128, "QUERIES": invariant_attention.QUERIES}
KEYS = {"PAGE": 16, "KEYS": invariant_attention.KEYS, "SLIDING": 0, "PRECISE": False}
EXPANSION = {"FIRST": 3584, "SECOND": 512, "THIRD": 512, "TOKENS": 16, "OUTPUTS": 64, "RANK": 128}
EXPANSION |= {"EVEN": True, "PRECISE": False, "KNOWN": True}


def compile_for(
    capability: int, kernel: Any, constants: dict[str, Any], options: dict[str, Any], parted: bool = False
) -> frozenset[str]:
    """The tensor core instructions of a kernel, whatever their width, and the layouts of what it sums.

    ``parted``: does it read parts of a product?
    """

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in LONG or name in FLOATS:
            return "*i64" if name in LONG else "*fp32"
        if name == "num_text":
            return "i32" if constants["KNOWN"] else "*i64"
        if name in COUNTS or name in EVEN or name in NUMBERS:
            return NUMBERS.get(name, "i32")
        return "*fp32" if parted and name in ("values", "y") else "*bf16"

    signature = {name: type_of(name) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    even = [index for index, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in EVEN]
    source = ASTSource(kernel, signature, places, {(index,): [["tt.divisibility", 16]] for index in even})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    used = compiled.metadata.shared
    assert used <= 1024 * SHARED[capability], f"{kernel.__name__} {constants} takes {used} bytes on {capability}"
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#.*)$", text, re.MULTILINE))
    sums = re.findall(r"tt\.reduce.*?\}\) : \(tensor<\S*?, (.*?)>\) ->", text, re.DOTALL)
    found = re.findall(r"w?g?mma\.\S*sync\.\S*(m\d+)n\d+(k\d+)(\S+)", compiled.asm["ptx"])
    named = {re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), each) for each in sums}
    return frozenset(map("".join, found)) | named


def compile_attention(capability: int) -> None:
    """The kernels of steps that are not batch-invariant."""
    heads = {name: ATTENTION[name] for name in ("HEADS", "SIZE", "SIZE_UP")}
    for verified, masks, groups in [(1, 0, 0), (4, 3, 1), (6, 5, 6)]:
        width = verified + masks * groups
        window = {"WIDTH": width, "FOLDS": ATTENTION["FOLDS"], "VERIFIED": verified, "MASKS": masks, **heads}
        window |= {"QUERIES": 64, "KEYS": attention.BLOCK_N, "COLUMNS": 16, "PAGE": 16, "PRECISE": False}
        for alone, stores in product([False, True], [False, True]):
            options = {"ALONE": alone, "STORES": stores, "SLIDING": 0, "CAP": 0.0, "SINKS": False}
            compile_for(capability, attention._attend, window | options, {})
        combined = {name: window[name] for name in ("WIDTH", "FOLDS", "HEADS", "SIZE", "SIZE_UP")}
        compile_for(capability, attention._combine, combined | {"SPLITS": 4, "QUERIES": 8}, {})
    stored = {"WIDTH": 64, "PAGE": 16, "COLUMNS": 64, **heads}
    compile_for(capability, attention._store, stored, {})


def main() -> None:
    step = 128
    for capability, most in SHARED.items():
        products._shared_memory = lambda _, most=most: 1024 * (most - 4)  # type: ignore[assignment]
        kinds = set()
        for parted, (sets, known), (_, _, tile) in product(
            [False, True], [(1, False), (2, False), (2, True)], products.TILES
        ):
            options = products._options(tile, step, torch.empty(0, dtype=torch.bfloat16))
            constants = {"TOKENS": tile.tokens, "OUTPUTS": tile.outputs, "INPUTS": step, "PARTS": 2, "PART": 1024}
            constants |= {
                "SETS": sets,
                "KNOWN": known,
                "ALONE": not parted,
                "EVEN": True,
                "BIAS": not parted,
                "PRECISE": False,
            }
            kinds.add(compile_for(capability, products._product, constants, options))
        assert len(kinds) == 1 and all(kinds), kinds
        stages = invariant_attention.num_stages(torch.bfloat16)
        options = {"num_warps": 4, "num_stages": stages, **layers.UNFUSED}
        kinds = set()
        for alone, (verified, masks, groups) in product([False, True], [(1, 0, 0), (4, 3, 1), (4, 3, 4), (64, 0, 0)]):
            window = {"WIDTH": verified + masks * groups, "VERIFIED": verified, "MASKS": masks, "ALONE": alone}
            kinds.add(compile_for(capability, invariant_attention._attend, ATTENTION | KEYS | window, options))
        assert len(kinds) == 1 and all(kinds), kinds
        compile_attention(capability)
        head = {"VOCABULARY": 49152, "RANK": 128, "RANKS": 128, "PART": markov.PART, "PRECISE": False}
        kinds = {compile_for(capability, markov._add_head, head | {"MASKS": masks}, {}) for masks in (16, 32, 64)}
        products_of = {frozenset(each for each in kind if each[0] == "m") for kind in kinds}  # masses may differ
        assert len(products_of) == 1 and all(products_of), kinds
        options["num_stages"] = 3
        compile_for(capability, invariant_attention._combine, ATTENTION | {"WIDTH": 16}, options)
        for kernel, constants in (
            (products._expand, EXPANSION),
            (layers._embed, ROW),
            (layers._add_and_norm, ROW),
            (layers._activate, {"SIZE": 1536, "BLOCK": 1024}),
            (layers._rotate_and_store, ROTARY | {"NORMS": False}),
            (layers._rotate_and_store, ROTARY | {"NORMS": True}),
        ):
            kinds = set()
            for parted in (False, True):
                parts = {
                    name: value
                    for name, value in {"PARTS": 1 + parted, "BIAS": parted}.items()
                    if name in kernel.arg_names
                }
                kinds.add(compile_for(capability, kernel, constants | parts, options, parted))
            assert len(kinds) == 1, kinds
        print(capability, "compiled")


if __name__ == "__main__":
    main()
