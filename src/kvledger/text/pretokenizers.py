"""Pre-tokenizers of byte-level BPE: how a text is cut into words before any merge, by `tokenizer.ggml.pre`.

Each row is a list of regular expressions applied one after the other: every match becomes a piece of its own and what
lies between matches stays a piece, too. They are those of the models' own tokenizer.json, under the names that
llama.cpp gives them (src/llama-vocab.cpp). A name without a row is an error: a wrong guess would change tokens
silently.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.errors import UnsupportedModel, nearest

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"

_LLAMA3 = "|".join([_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES])
_QWEN2 = "|".join([_SUFFIX, _WORD, r"\p{N}", _SYMBOLS, _SPACES])
_QWEN35 = "|".join([_SUFFIX, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES])
_TEKKEN = "|".join([_LOWER_WORD, _UPPER_WORD, r"\p{N}", _PATHS, _SPACES])
_GPT4O = "|".join([f"{_LOWER_WORD}{_SUFFIX}?", f"{_UPPER_WORD}{_SUFFIX}?", r"\p{N}{1,3}", _PATHS, _SPACES])
_SEED = "|".join([_SUFFIX, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES])
_DEEPSEEK3 = "|".join(
    [
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _SPACES,
    ]
)
_BAILING = "|".join(
    [
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    ]
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_CJK_KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
_WIDE_SYMBOLS = r"\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}"
# letters with case as DeepSeek LLM's tokenizer lists them: code points in hexadecimal
_CASED_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c "
    "38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b "
    "1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 "
    "1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 "
    "2115 2119-211d 2124 2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b "
    "2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 "
    "fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df "
    "1e900-1e943 "
)
_DEEPSEEK_LETTERS = "".join(
    "-".join(rf"\x{{{point}}}" for point in part.split("-")) for part in _CASED_LETTERS.split()
)  # fmt: skip
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[!-/:-~{_WIDE_SYMBOLS}]+", r"\s+$", _CJK, r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Regular expressions in order; `ignore_merges`: a piece that is a token as a whole is not merged from parts."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False  # unless the file says otherwise


_NAMES_BY_RULE = [
    (PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
     "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4"),
    (PreTokenizer((_QWEN2,)), "qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez solar-open grok-2 kormo"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm"),
    (PreTokenizer(_DEEPSEEK), "deepseek-llm"),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_SEED,)), "seed-coder"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
]  # fmt: skip
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _NAMES_BY_RULE for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of `tokenizer.ggml.pre`. Raises UnsupportedModel with the nearest names."""
    if name not in PRE_TOKENIZERS:
        close = nearest(name, PRE_TOKENIZERS)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise UnsupportedModel(f"unknown pre-tokenizer {name!r}{hint}; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]
