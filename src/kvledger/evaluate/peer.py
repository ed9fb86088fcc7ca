"""llama.cpp as a contender: another Python runs `llamacpp_logits.py` and sends its logits through a pipe."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from kvledger.errors import ConfigError
from kvledger.evaluate.contender import ROWS
from kvledger.evaluate.divergence import Logits

SCRIPT = Path(__file__).with_name("llamacpp_logits.py")


def check_peer(python: Path) -> None:
    """Raises ConfigError where that Python cannot be run or has no llama-cpp-python."""
    try:
        done = subprocess.run([str(python), str(SCRIPT)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as error:
        raise _cannot_run(python, error) from error
    if done.returncode:
        raise ConfigError(f"--peer-python {python} cannot load llama-cpp-python: {_last_words(done.stderr)}")


def _cannot_run(python: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--peer-python {python} cannot be run: {error.strerror}")


def _last_words(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it ended without a word"


class LlamaCpp:
    """The same file in llama.cpp, KV in f16. Raises ConfigError where that Python or llama.cpp cannot do it."""

    kv_bytes_per_token = None
    notes: tuple[str, ...] = ()

    def __init__(self, python: Path, model: Path, context: int, threads: int, vocab_size: int) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        command = [str(python), str(SCRIPT), str(model), str(context), str(threads)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            raise _cannot_run(python, error) from error
        self.vocab_size, self.name = self._greeting()
        if self.vocab_size != vocab_size:
            self.close()
            raise ConfigError(f"llama.cpp has {self.vocab_size} tokens in its vocabulary, the model {vocab_size}")

    def logits(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """As `Contender` says."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(list(token_ids)).encode() + b"\n")
        self._process.stdin.flush()
        for first in range(0, len(token_ids), ROWS):
            yield self._rows(min(ROWS, len(token_ids) - first))

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _greeting(self) -> tuple[int, str]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        said = json.loads(line)
        return int(said["vocab_size"]), f"llama.cpp (llama-cpp-python {said['version']}, f16 KV)"

    def _rows(self, count: int) -> Logits:
        assert self._process.stdout
        size = 4 * count * self.vocab_size
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._failed()
        return np.frombuffer(data, np.float32).reshape(count, self.vocab_size)

    def _failed(self) -> ConfigError:
        self._process.wait()
        self._errors.seek(0)
        said = _last_words(self._errors.read())
        self.close()
        return ConfigError(f"llama.cpp has ended: {said}")
