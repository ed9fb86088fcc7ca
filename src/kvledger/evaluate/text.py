"""The text that is evaluated: bundled or the user's, as windows of token ids. Knows the tokenizer, no model."""

from __future__ import annotations

import codecs
from importlib.resources import files
from pathlib import Path

from kvledger.errors import ConfigError
from kvledger.text.tokenizer import Tokenizer

BUNDLED = "constitution.txt"  # public domain, see data/texts/README.md
_BYTES_PER_TOKEN = 32  # more than tokens of any text have on average, so enough is read


def read_text(path: Path | None, num_tokens: int) -> str:
    """The beginning of a file in UTF-8, enough for `num_tokens`; None: the bundled text. Raises ConfigError."""
    if path is None:
        return files("kvledger.data").joinpath("texts", BUNDLED).read_text("utf-8")
    try:
        with path.open("rb") as file:
            data = file.read(max(1 << 16, _BYTES_PER_TOKEN * num_tokens))
        return codecs.getincrementaldecoder("utf-8")().decode(data)  # the last character may be cut
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8: byte {error.start} is {data[error.start]:#04x}") from error


def windows(token_ids: list[int], prefix: list[int], length: int) -> list[list[int]]:
    """The text in stretches of `length` tokens, `prefix` in front of each counted; all start from an empty context."""
    stride = length - len(prefix)
    cut = [prefix + token_ids[i : i + stride] for i in range(0, len(token_ids), stride)]
    return [window for window in cut if len(window) > 1]  # one token alone predicts nothing that is known


def begin_of_text(tokenizer: Tokenizer) -> list[int]:
    """What the model wants in front of every text: its begin-of-text token, or nothing."""
    return [i for i in tokenizer.encode("", add_special=True)[:1] if i == tokenizer.bos_token_id]
