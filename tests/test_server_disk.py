"""`kvledger serve --kv-disk`: quick after a restart, never wrong after a crash, never in the way when it fails."""

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from kvledger.cache.disk import _HEADER, MAGIC
from kvledger.cli.main import main
from tiny_model import write_tiny_model

PROMPT = "a long system prompt that every request begins with, " * 6
BLOCK = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two models of the same shape and other weights."""
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny_model(folder / f"tiny-{seed}.gguf", seed) for seed in range(2)]


@contextmanager
def served(model: Path, *options: str, **process_options) -> Iterator[SimpleNamespace]:
    """A server process; on leaving it gets SIGTERM if it still lives."""
    command = [sys.executable, "-m", "kvledger", "serve", str(model), "--port", "0", "--kv-memory", "1MiB", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **process_options) as process:
        said: list[str] = []
        found = None
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"serving +(http://\S+)/v1", line):
                break
        if found is None:
            raise AssertionError("".join(said))
        here = SimpleNamespace(process=process, url=found[1], said=said)
        transport = httpx.HTTPTransport(retries=3)
        here.http = httpx.Client(base_url=found[1], transport=transport, timeout=30)
        while here.http.get("/health").status_code != 200:
            pass
        try:
            yield here
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            said += process.stderr.readlines()
            here.code = process.wait(20)


def ask(server: SimpleNamespace, prompt: str = PROMPT) -> tuple[str, int, int]:
    """(greedy text, cached tokens, prompt tokens)."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return str(answer["choices"][0]["token_ids"]), cached, usage["prompt_tokens"]


def whole_blocks(num_tokens: int) -> int:
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def plain(models) -> str:
    """What the first model says without any tier."""
    with served(models[0]) as server:
        return ask(server)[0]


def test_the_same_prompt_is_found_after_a_restart(models, plain, tmp_path):
    disk = ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "2MiB")
    with served(models[0], *disk) as server:
        text, cached, length = ask(server)
        assert (text, cached) == (plain, 0)
    assert server.code == 0
    with served(models[0], *disk) as server:
        books = server.http.get("/ledger").json()["tiers"]["disk"]
        assert books["used"] >= length // BLOCK
        assert books["bytes"] <= 2 << 20
        assert "found there" in "".join(server.said)
        assert ask(server) == (plain, whole_blocks(length), length)
        metrics = server.http.get("/metrics").text
        assert re.search(rf'kvledger:tier_blocks{{[^}}]*tier="disk"}} {float(books["used"])}', metrics)
    with served(models[1], *disk) as server:  # same shapes, other weights: nothing of the first one's
        text, cached, _ = ask(server)
        assert cached == 0
        assert text != plain


def test_the_books_begin_with_the_first_request(models, tmp_path):
    """What the server computes at its start for itself is no query, and nothing of it is kept, here or on disk."""
    with served(models[0], "--kv-disk", str(tmp_path)) as server:
        books = server.http.get("/ledger").json()
        assert books["prefix_cache"] == {"queries": 0, "hits": 0}
        assert books["blocks"]["free"] == books["blocks"]["total"]
        assert books["tiers"]["disk"]["used"] == 0
        length = ask(server)[2]
        assert ask(server)[1] == whole_blocks(length)
        books = server.http.get("/ledger").json()
        metrics = server.http.get("/metrics").text
        for name, count in (("queries", 2 * length), ("hits", whole_blocks(length))):
            assert books["prefix_cache"][name] == count
            assert re.search(rf"vllm:prefix_cache_{name}_total{{[^}}]*}} {float(count)}\n", metrics)
        assert books["blocks"]["cached"] == books["tiers"]["disk"]["used"] == (length + 12 - 1) // BLOCK


def test_after_kill_9_only_whole_records_are_used(models, plain, tmp_path):
    disk = ("--kv-disk", str(tmp_path), "--kv-disk-size", "2MiB")
    with served(models[0], *disk) as server:
        _, _, length = ask(server)
        server.process.kill()
    (file,) = tmp_path.glob("*.kv")
    with served(models[0], *disk) as server:
        assert ask(server) == (plain, whole_blocks(length), length)
        server.process.kill()
    content = bytearray(file.read_bytes())
    starts = [m.start() for m in re.finditer(re.escape(MAGIC), content)]
    assert len(starts) >= length // BLOCK
    for start in starts[::2]:  # as if the second half of the write had not come
        content[start + _HEADER.size + 100 : start + _HEADER.size + 4000] = bytes(3900)
    content[starts[1] + 20] ^= 1  # a key that is none
    file.write_bytes(content)
    with served(models[0], *disk) as server:
        text, cached, _ = ask(server)
        assert text == plain
        assert cached < whole_blocks(length)
    file.write_bytes(os.urandom(len(content)))
    with served(models[0], *disk) as server:
        assert ask(server)[:2] == (plain, 0)


def test_a_full_disk_ends_saving_not_serving(models, plain, tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    with served(models[0], "--kv-disk", str(tmp_path), preexec_fn=small_files) as server:
        first, second = ask(server), ask(server)
        assert first[0] == second[0] == plain
        assert server.http.get("/ledger").json()["tiers"]["disk"]["failure"]
        assert re.search(r'kvledger:tier_failed{[^}]*tier="disk"} 1.0', server.http.get("/metrics").text)
    assert server.code == 0
    assert sum("disk tier saves nothing more" in line for line in server.said) == 1


def test_books_tell_of_the_host_tier(models, plain):
    with served(models[0], "--swap-space", "1MiB") as server:
        assert ask(server)[0] == plain
        tiers = server.http.get("/ledger").json()["tiers"]
        assert tiers["disk"] is None
        assert tiers["host"]["used"] == 0
        assert 0 < tiers["host"]["bytes"] <= 1 << 20


def test_a_second_server_in_the_same_folder_is_told(models, tmp_path, capsys):
    with served(models[0], "--kv-disk", str(tmp_path)):
        assert "in use by another process" in refusal(capsys, models[0], "--kv-disk", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-disk", "/proc/nowhere"), "/proc/nowhere cannot hold the KV tier"),
        (("--kv-disk", "{file}"), "cannot hold the KV tier"),
        (("--kv-disk", "{folder}", "--kv-disk-size", "1KiB"), "1.00 KiB of disk hold no KV block"),
        (("--kv-disk", "{folder}", "--kv-disk-size", "big"), "big"),
        (("--kv-disk", "{folder}", "--no-prefix-cache"), "prefix cache"),
        (("--swap-space", "900TiB"), "900.00 TiB"),
        (("--kv-memory", "900TiB"), "of weights are more than this machine's"),
        (("--kv-memory", "1KiB"), "hold no block"),
        (("--block-size", "7"), "7 is not one of 8, 16"),
        (("--max-model-len", "1M"), "max_model_len 1048576 is not within"),
    ],
)
def test_a_tier_that_cannot_be_is_one_sentence(models, tmp_path, capsys, options, said):
    (tmp_path / "file").write_text("")
    places = {"file": tmp_path / "file", "folder": tmp_path / "kv"}
    assert said in refusal(capsys, models[0], *(option.format(**places) for option in options))


def refusal(capsys: pytest.CaptureFixture, model: Path, *options: str) -> str:
    """The one line that `kvledger serve` says when it cannot start."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(model), "--port", "0", "--kv-memory", "1MiB", *options])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line
