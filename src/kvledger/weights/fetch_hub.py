"""Fetches a model from the Hugging Face hub: one GGUF file, or a folder with config.json and safetensors.

Uses huggingface_hub, so HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they always mean, and a download that was
broken off goes on where it stopped.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from kvledger.errors import FetchError, nearest
from kvledger.weights.downloads import disk_message, mark_complete, without_places
from kvledger.weights.store import Progress

_PATTERNS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
             "model*.safetensors", "model.safetensors.index.json"]  # fmt: skip
_CONNECTION_ERRORS = {"ConnectionError", "ConnectError", "TimeoutException", "Timeout", "NetworkError",
                      "TransportError", "LocalEntryNotFoundError"}  # fmt: skip
REACH_S = 5.0  # for a first answer of the hub
_PREFERRED = ("Q4_K_M", "Q4_1", "Q4_0", "Q8_0")  # among several GGUF files of one repository


def fetch_repository(repo: str, file: str | None, folder: Path, progress: Progress) -> None:
    """`folder` then holds `file`, or the repository's model where no file is named. Raises FetchError."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download

        _check_connection()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would print every retry
        folder.mkdir(parents=True, exist_ok=True)
        bar = _bar(progress)
        if file is None:
            file = choose(repo, _files(repo))
        if file is not None:
            hf_hub_download(repo, file, local_dir=folder, tqdm_class=bar)
        else:
            snapshot_download(repo, local_dir=folder, allow_patterns=_PATTERNS, tqdm_class=bar)
        mark_complete(folder)
    except FetchError:
        _drop_if_empty(folder)
        raise
    except Exception as error:  # the library passes on those of its HTTP client
        _drop_if_empty(folder)
        raise FetchError(_explain(repo, file, error, folder)) from error


def choose(repo: str, files: Sequence[str]) -> str | None:
    """The GGUF file to take of a repository; None for its safetensors. Raises FetchError where it cannot be told."""
    ggufs = [name for name in files if name.endswith(".gguf")]
    if any(name.endswith(".safetensors") for name in files):
        return None
    for kind in _PREFERRED:
        found = [name for name in ggufs if kind.lower() in name.lower()]
        if len(found) == 1:
            return found[0]
    if len(ggufs) == 1:
        return ggufs[0]
    if not ggufs:
        raise FetchError(f"{repo} holds neither a GGUF file nor safetensors")
    raise FetchError(f"{repo} holds {len(ggufs)} GGUF files; name one: hf:{repo}:{ggufs[0]}")


def _check_connection() -> None:
    """Raises ConnectionError where the hub cannot be reached within a few seconds; its client tries for half a minute.

    Not where a proxy stands between, which looks names up itself, nor where the client is told to be offline.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    endpoint = urlsplit(constants.ENDPOINT)
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(_answers(endpoint)), daemon=True)
    asking.start()
    asking.join(REACH_S)
    if found != [True]:
        raise ConnectionError(f"{endpoint.hostname} cannot be reached")


def _answers(endpoint: SplitResult) -> bool:
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def _files(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    return list(HfApi().list_repo_files(repo))


def _bar(progress: Progress) -> Any:
    """A tqdm that tells `progress` instead of drawing."""
    from tqdm.auto import tqdm

    class Reporting(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B":
                progress(int(self.n), int(self.total) if self.total else None)
            return shown

    return Reporting


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing to flush."""


def _explain(repo: str, file: str | None, error: Exception, folder: Path) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo} asks for a licence to be accepted on its page first; then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {repo}, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{repo} has no file {file}{_hint(repo, file)}"
    if isinstance(error, errors.OfflineModeIsEnabled) or _is_connection(error):
        return f"{repo} could not be downloaded: the hub does not answer; connect once, or give the path of a file"
    if isinstance(error, OSError) and error.errno:
        return disk_message(error, folder)
    return f"{repo} could not be downloaded: {without_places(str(error).splitlines()[0] if str(error) else '?')}"


def _is_connection(error: Exception) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _CONNECTION_ERRORS)


def _hint(repo: str, file: str | None) -> str:
    try:
        close = nearest(file or "", [name for name in _files(repo) if name.endswith(".gguf")])
    except Exception:  # only a hint
        return ""
    return f"; nearest: {', '.join(close)}" if close else ""


def _drop_if_empty(folder: Path) -> None:
    """No trace of a model that was never there; a partial download stays and is continued."""
    while folder.is_dir() and not os.listdir(folder):
        folder.rmdir()
        folder = folder.parent
