"""Writes tests/golden/reference_logits.npz: what float32 arithmetic says on the default model's own weights.

Run with a Python that has torch, transformers and gguf (they are no dependencies of the project), from the top folder:

    PYTHONPATH=src python scripts/make_reference.py MODEL.gguf

transformers reads the GGUF itself, so neither our decoding of weights nor our naming of tensors is used; only our
tokenizer and chat template, and the token ids are stored with the result. For every position of every prompt the 32
largest logits are kept, and for the last one all of them (as float16).
"""

import sys
import tomllib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvledger.text.chat import ChatTemplate
from kvledger.text.tokenizer import Tokenizer
from kvledger.weights.gguf import read_header

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
TOP = 32


def prompt_ids(path: Path) -> dict[str, list[int]]:
    """Name → token ids of the ten prompts."""
    metadata = read_header(path).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    template = ChatTemplate.from_metadata(metadata, tokenizer)
    found = {}
    for row in tomllib.loads((GOLDEN / "prompts.toml").read_text())["prompt"]:
        messages = [{"role": "system", "content": row["system"]}] if "system" in row else []
        if "chat" in row:
            text = template.render([*messages, {"role": "user", "content": row["chat"]}])
        else:
            text = row["text"]
        found[row["name"]] = tokenizer.encode(text)
    return found


def main(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    arrays: dict[str, np.ndarray] = {}
    for name, ids in prompt_ids(path).items():
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
        arrays[f"{name}/ids"] = np.array(ids, np.int32)
        arrays[f"{name}/top_ids"] = top.astype(np.int32)
        arrays[f"{name}/top_logits"] = np.take_along_axis(logits, top, 1).astype(np.float32)
        arrays[f"{name}/last"] = logits[-1].astype(np.float16)
    np.savez_compressed(GOLDEN / "reference_logits.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
