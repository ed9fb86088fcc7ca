"""Models whose header lies: a child process loads mutants of a tiny model of every architecture and has them answer.

    PYTHONPATH=src:tests python tests/fuzz_models.py FOLDER FIRST COUNT [MODEL …]

Mutant i of a model is a function of the model's name and i. A line of JSON before each says what it is (should the
interpreter die, the last line tells why), and one after it says how it ended.
"""

import json
import random
import resource
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from gguf_bytes import byte_tokenizer, write
from golden_models import described, token_ids, write_folder
from kvledger import LLM, SamplingParams
from kvledger.errors import KvledgerError
from kvledger.weights.open import open_weights

NUMBERS = [
    0, 1, 2, 3, 5, 7, 8, 16, 31, 33, 63, 65, 100, 128, 255, 257, 1000, 4096, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 39, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 31), -(1 << 63),
]  # fmt: skip
FLOATS = [0.0, 0.5, -1.0, 1e-30, 1e30, 1e300, float("nan"), float("inf"), float("-inf")]
OTHERS = [True, False, "", "x", "yarn", "linear", [], [0], [1, 2], [1.5, 2.5], ["a"], [-1] * 8, [1 << 40] * 8,
          [True, False]]  # fmt: skip
TYPES = ["F16", "BF16", "F64", "I8", "I32", "Q8_0", "Q4_1", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "Q8_1"]
Tensors = dict[str, tuple[tuple[int, ...], str, bytes]]


def whole_model(name: str, folder: Path) -> tuple[dict[str, object], Tensors]:
    """Metadata, with every key that its architecture could read, and tensors of the tiny model `name`."""
    opened = open_weights(write_folder(folder / f"{name}-folder", described()[name]))
    tensors = {t.name: (t.shape, t.ggml_type, t.data.tobytes()) for t in opened.tensors.values()}
    return {**opened.metadata, **byte_tokenizer(256)}, tensors


def keys_of(metadata: dict[str, object]) -> list[str]:
    """Keys that are there and keys that could be."""
    arch = metadata["general.architecture"]
    more = [
        "expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count", "expert_shared_count",
        "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_gating_func", "expert_weights_norm",
        "expert_weights_scale", "leading_dense_block_count", "nextn_predict_layers", "attention.sliding_window",
        "attention.sliding_window_pattern", "attention.q_lora_rank", "attention.kv_lora_rank", "attention.scale",
        "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa",
        "attention.value_length_swa", "attention.shared_kv_layers", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "rope.scaling.attn_factor", "rope.freq_base_swa", "attn_logit_softcapping",
        "final_logit_softcapping", "vocab_size",
    ]  # fmt: skip
    return list(dict.fromkeys([*metadata, *(f"{arch}.{key}" for key in more)]))


def mutate(metadata: dict[str, object], tensors: Tensors, rng: random.Random) -> str:
    """Change one thing of the header, most often a number; says what."""
    kind = rng.random()
    if kind < 0.7:
        arch = str(metadata["general.architecture"])
        keys = [k for k in keys_of(metadata) if k.startswith(f"{arch}.")] if rng.random() < 0.9 else list(metadata)
        key = rng.choice(keys)
        value = odd_value(metadata.get(key), rng)
        metadata[key] = value
        return f"{key} = {value!r}"
    name = rng.choice(list(tensors))
    shape, type_, data = tensors[name]
    if kind < 0.77:
        del tensors[name]
        return f"{name} absent"
    if kind < 0.87:
        shape = odd_shape(shape, rng)
        tensors[name] = (shape, "F32", fill(shape, 4 * int(np.prod(shape)), rng))
    elif kind < 0.95:
        type_ = rng.choice(TYPES)
        tensors[name] = (shape, type_, fill(shape, type_bytes(shape, type_), rng))
    else:
        values = np.frombuffer(data, np.float32).copy()
        values[rng.randrange(len(values)) :] = rng.choice([np.nan, np.inf, -np.inf, 3e38, 0.0, 1e-44])
        tensors[name] = (shape, type_, values.tobytes())
        return f"{name} holds {values[-1]}"
    return f"{name} = {tensors[name][:2]}"


def odd_value(value: object, rng: random.Random) -> object:
    """Something else, near or absurd; None: absent."""
    kind = rng.random()
    if kind < 0.1:
        return None
    if kind < 0.25 and isinstance(value, int) and not isinstance(value, bool):
        return storable(value + rng.choice([-2, -1, 1, 2, value, value - 1, 31, 32, -32]))
    if kind < 0.4 and isinstance(value, int) and not isinstance(value, bool):
        return storable(rng.choice([value // 2, value // 4, value * 2, value * 4]))
    if kind < 0.75:
        return rng.choice(NUMBERS)
    return rng.choice(FLOATS if kind < 0.87 else OTHERS)


def storable(value: int) -> int:
    return max(-(1 << 63), min((1 << 64) - 1, value))


def odd_shape(shape: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """Other dimensions, of at most a few hundred thousand numbers."""
    kind, at = rng.randrange(5), rng.randrange(len(shape))
    if kind == 0:
        return shape[::-1]
    if kind == 1:
        return (*shape, 1) if len(shape) < 4 else shape[:1]
    if kind == 2:
        return (int(np.prod(shape)),)
    return tuple(
        max(1, rng.choice([n // 2, n * 2, n + 1, n - 1, 1, 32])) if i == at else n for i, n in enumerate(shape)
    )


def type_bytes(shape: tuple[int, ...], type_: str) -> int:
    from kvledger.weights.ggml_types import GGML_TYPES

    kind = GGML_TYPES[type_]
    return -(-int(np.prod(shape)) // kind.block_elements) * kind.block_bytes


def fill(shape: tuple[int, ...], num_bytes: int, rng: random.Random) -> bytes:
    return rng.randbytes(num_bytes) if rng.random() < 0.5 else bytes(num_bytes)


def use(path: Path, ids: list[int]) -> None:
    """Load, answer a prompt longer than any window, twice at once."""
    with LLM(str(path), kv_memory="2MiB", num_threads=1, progress=lambda text: None) as llm:
        vocab, longest = llm.loaded.model.vocab_size, llm.loaded.max_model_len - 4
        prompt = [i % vocab for i in ids][: max(1, longest)]
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
        for out in llm.generate([prompt, prompt[:3]], params):
            assert out.outputs[0].finish_reason in ("length", "error"), out.outputs[0]


def one(path: Path, ids: list[int]) -> str:
    """How it ended: loaded, refused (and why), or what it should not have been."""
    try:
        use(path, ids)
        return "loaded"
    except KvledgerError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception:
        return "WRONG: " + traceback.format_exc()


def main(folder: Path, first: int, count: int, names: list[str]) -> None:
    for name in names or described():
        whole = whole_model(name, folder)
        ids = token_ids(name, 256)
        use(
            write(folder / "whole.gguf", *whole), ids
        )  # unharmed it answers; and kernels are compiled outside the count
        for index in range(first, first + count):
            rng = random.Random(f"{name}/{index}")
            metadata, tensors = dict(whole[0]), dict(whole[1])
            what = "; ".join(mutate(metadata, tensors, rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
            path = write(folder / "mutant.gguf", metadata, tensors)
            print(json.dumps({"model": name, "index": index, "mutation": what}), flush=True)
            began = time.process_time()
            end = one(path, ids)
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(json.dumps({"end": end, "seconds": round(time.process_time() - began, 2), "mib": rss}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
