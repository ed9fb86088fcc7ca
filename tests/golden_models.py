"""Tiny random models, one per architecture: shapes in golden/tiny.json, weights made here from the tensors' names.

So the fixtures are logits alone. The script that makes them (scripts/make_tiny.py) and the tests call the same
functions; the numbers come from the raw 64-bit output of PCG64, which numpy keeps stable.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent / "golden"
NUM_TOKENS = 24


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [-1, 1), a function of `name` and nothing else."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    return ((raw >> np.uint64(40)).astype(np.float32) / 2**23 - 1).reshape(shape)


def weight(seed: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms near their neutral value, biases small, matrices so that variance passes through."""
    values = uniform(f"{seed}/{name}", shape)
    if name.endswith("norm.weight"):
        neutral = 0 if seed.startswith("gemma") else 1
        return (neutral + 0.3 * values).astype(np.float32)
    if len(shape) == 1:
        return (0.3 * values).astype(np.float32)
    if "embed_tokens" in name:
        return values
    router = name.endswith(("mlp.gate.weight", "moe.gate.weight"))
    gain = 3.0 if router and not seed.startswith("deepseek3") else 1.0  # experts far apart; a sigmoid would saturate
    return (gain * np.sqrt(3 / shape[-1]) * values).astype(np.float32)


def token_ids(model: str, vocab_size: int) -> list[int]:
    return ((uniform(f"{model}/tokens", (NUM_TOKENS,)) + 1) / 2 * vocab_size).astype(int).tolist()


def write_folder(folder: Path, row: dict) -> Path:
    """A Hugging Face folder of the model that a row of tiny.json describes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(row["config"]))
    tensors = {name: weight(row["seed"], name, tuple(shape)) for name, shape in row["shapes"].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def described() -> dict[str, dict]:
    """Name → {"seed": …, "config": …, "shapes": …} of all models with fixtures."""
    return json.loads((GOLDEN / "tiny.json").read_text())


def logits(model: str) -> np.ndarray:
    """float32[NUM_TOKENS, vocabulary] by transformers in float32."""
    with np.load(GOLDEN / "tiny_logits.npz") as arrays:
        return arrays[model]
