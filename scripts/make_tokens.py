"""Writes tests/golden/tokens.json: what llama.cpp and sentencepiece make of some texts.

Run with a Python that has llama-cpp-python, sentencepiece and gguf (no dependencies of the project), from the top:

    PYTHONPATH=src python scripts/make_tokens.py MODEL.gguf

Byte-level BPE: the default model's vocabulary under every rule for cutting words that llama.cpp knows, too.
SentencePiece: a small vocabulary trained on the licence text, with and without the leading space.
"""

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece
from gguf import GGUFWriter
from llama_cpp import Llama

from kvledger.text.pretokenizers import PRE_TOKENIZERS
from kvledger.weights.gguf import read_header

TOP = Path(__file__).parent.parent
TEXTS = [
    "Hello, world!", "The capital of France is Paris.", "",  " ", "\n\n\n", "   leading and trailing   ",
    "def f(x):\n    return x**2  # squared\n\n\n\tif True:\r\n  pass", "tab\tseparated\tvalues\t\t\n", "a\r\nb\rc",
    "12345 3.14159 1,000,000 ½ ① ٣٤", "1st 2nd 3rd x1y2z3 0xDEADBEEF", "don't can't I'LL we'Ve they'RE 's 'S ’s",
    "你好，世界！今天天气怎么样？", "日本語のテキスト カタカナ 한국어 텍스트", "Привет мир ქართული עברית العربية हिन्दी",
    "naïve café Ünïcödé ﬁ A\u0301 e\u0301", "emoji 👩‍👩‍👧‍👦 🎉🎉 \U0001f1e9\U0001f1ea 🙂",
    "\u00a0nbsp\u3000ideographic\u200bzero",
    "<|im_start|>user\nHi<|im_end|>\n", "a<|endoftext|>b <s> </s>", "http://example.com/a/b?c=d&e=f#g",
    "... --- !!! ??? $$$ ^^^ ~~~ ```code``` |a|b|", "camelCaseWordsAndHTTPServer", "x" * 200, "\x00\x01\x7f control",
    "Hello  world   three    four", "ℂℝ ΩK ǅ ʰ ª", "\ufffd", "    four\n        eight\n",
]  # fmt: skip


def vocabulary(path: Path, kind: str, pre: str, rows: dict[str, list[Any]], add_space: bool = False) -> Llama:
    """llama.cpp over a file that holds a vocabulary and nothing else."""
    writer = GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(1)
    writer.add_feed_forward_length(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(rows["tokens"])
    writer.add_token_types(rows["token_type"])
    if kind == "gpt2":
        writer.add_token_merges(rows["merges"])
    else:
        writer.add_token_scores(rows["scores"])
        writer.add_add_space_prefix(add_space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Llama(str(path), vocab_only=True, verbose=False)


def encode(llama: Llama, special: bool) -> list[list[int]]:
    return [llama.tokenize(text.encode(), add_bos=False, special=special) for text in TEXTS]


def byte_level(model: Path, scratch: Path) -> dict[str, Any]:
    metadata: Any = read_header(model).metadata
    rows = {key: metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges")}
    found: dict[str, Any] = {}
    for pre in {rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}.values():  # one name per rule
        try:
            found[pre] = encode(vocabulary(scratch / f"{pre}.gguf", "gpt2", pre, rows), special=True)
        except ValueError:
            print(f"llama.cpp does not know {pre}")
    llama = vocabulary(scratch / "plain.gguf", "gpt2", metadata["tokenizer.ggml.pre"], rows)
    return {"by_pre": found, "without_special": encode(llama, special=False)}


def sentencepieces(scratch: Path) -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((TOP / "LICENSE").read_text().splitlines()), model_writer=model, model_type="bpe",
        vocab_size=700, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, user_defined_symbols=["<|user|>"], minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(pieces.vocab_size())
    kinds = [(pieces.is_unknown, 2), (pieces.is_control, 3), (pieces.is_byte, 6)]
    names = [pieces.id_to_piece(i) for i in ids]
    types = [next((code for test, code in kinds if test(i)), 4 if names[i] == "<|user|>" else 1) for i in ids]
    rows = {"tokens": names, "scores": [pieces.get_score(i) for i in ids], "token_type": types}
    return {
        **rows,
        "sentencepiece": [pieces.encode(text) for text in TEXTS],
        "with_space": encode(vocabulary(scratch / "a.gguf", "llama", "default", rows, add_space=True), special=True),
        "without_space": encode(vocabulary(scratch / "b.gguf", "llama", "default", rows), special=True),
    }


def main(model: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = {
            "texts": TEXTS,
            "byte_level": byte_level(model, Path(scratch)),
            "sentencepiece": sentencepieces(Path(scratch)),
        }
    (TOP / "tests/golden/tokens.json").write_text(json.dumps(found, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
