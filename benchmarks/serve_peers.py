"""kvledger's server beside llama.cpp's, on the same arrivals, one after the other on an otherwise idle machine.

    python benchmarks/serve_peers.py --model FILE.gguf --rate 2 --requests 100 --workload 128/32
        --ban 0 --ban 2 [--peer-python PYTHON] [--slo-ttft 1s --slo-tpot 50ms] [--out results/serve_peers.json]

Needs `pip install 'llama-cpp-python[server]'` in the Python given by --peer-python. Prompts are words for both, because
llama.cpp's Python server takes no token ids, and the ids that end a text are banned (0 and 2 for SmolLM2), because it
does not know ignore_eos. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvledger.cli.bench_serve import started_server


@contextmanager
def llama_cpp(python: str, model: str, port: int, threads: int) -> Iterator[str]:
    """llama-cpp-python's server; its address once it lists a model."""
    command = [python, "-m", "llama_cpp.server", "--model", model, "--port", str(port), "--n_ctx", "8192"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--verbose", "False"]
    command += ["--interrupt_requests", "False"]  # its default cuts a stream short when the next request comes
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while not answers(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{python} -m llama_cpp.server did not start; is llama-cpp-python[server] installed?")
            time.sleep(0.2)
        try:
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def measure(url: str, options: list[str]) -> dict[str, object]:
    """`kvledger bench serve` in a process of its own."""
    command = [sys.executable, "-m", "kvledger", "bench", "serve", "--url", url, "--text", "--json", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file, served by both")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--peer-port", type=int, default=8765)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--out", type=Path)
    args, options = parser.parse_known_args()
    with started_server(args.model, ["--threads", str(args.threads), "--kv-memory", args.kv_memory]) as url:
        ours = measure(url, options)
    with llama_cpp(args.peer_python, args.model, args.peer_port, args.threads) as url:
        theirs = measure(url, options)
    found = {
        "options": options,
        "machine": platform.processor() or platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }
    line = json.dumps(found | {"kvledger": ours, "llama.cpp": theirs})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
