"""Ours and its peers on the same file, the same shapes, the same machine; ratios at the end.

    python benchmarks/peers.py --model smollm2 --peer-python ~/peers/bin/python --json results/peers.json

`--peer-python` is an interpreter that can import llama_cpp or openvino_genai (the `peers` extra installs both); a peer
that cannot be imported is left out and named. Every runner answers `B` sequences of `P` random prompt tokens with `G`
tokens each, greedy, without an early end, and prints one JSON line per shape. Absolute figures of a shared machine
drift within minutes, so everybody's turn at a shape comes right after the others', `--rounds` times over, each time in
processes of their own; figures are the medians. Quote the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

SHAPES = [(1, 128, 64), (1, 512, 64), (8, 128, 32), (16, 128, 32), (32, 128, 32), (64, 128, 32), (1, 2048, 32)]
# (batch, prompt, output), figure → how many times the best peer ours should be
FLOORS = {
    ((1, 128, 64), "decode"): 1.5, ((1, 512, 64), "prefill"): 2.0, ((1, 2048, 32), "prefill"): 2.0,
    ((8, 128, 32), "decode"): 2.0, ((32, 128, 32), "decode"): 2.0, ((64, 128, 32), "decode"): 3.0,
}  # fmt: skip
PEERS = {"llama.cpp": "peer_llamacpp.py", "openvino": "peer_openvino.py"}
FIGURES = ("prefill", "decode")
HERE = Path(__file__).parent


def ours(model: str, shape: tuple[int, int, int], *, threads: int, kv_dtype: str) -> dict | None:
    """One measurement in a process of its own, like the peers'."""
    b, p, g = map(str, shape)
    found = answer("kvledger", shape, [
        sys.executable, "-m", "kvledger", "bench", "engine", "--model", model, "--batch", b, "--prompt", p,
        "--output", g, "--threads", str(threads), "--kv-dtype", kv_dtype, "--json",
    ])  # fmt: skip
    return found and {figure: found[f"{figure}_tokens_per_s"] for figure in FIGURES}


def peer(name: str, python: str, path: Path, shape: tuple[int, int, int], *, threads: int) -> dict | None:
    """A peer's measurement."""
    return answer(name, shape, [python, str(HERE / PEERS[name]), str(path), json.dumps([shape]), str(threads)])


def answer(name: str, shape: tuple[int, int, int], command: list[str]) -> dict | None:
    """The JSON that a runner prints, or nothing (and why) where it cannot run."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find("{")
    if done.returncode == 0 and start >= 0:
        return dict(json.loads(done.stdout[start:]))
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    print(f"{name}: left out at {shape} ({last[0]})", file=sys.stderr)
    return None


def measure(shape: tuple[int, int, int], rounds: int, runners: dict[str, Callable[..., dict | None]]) -> dict:
    """Everybody's median figures of a shape, by name."""
    turns: dict[str, list[dict]] = {}
    for _ in range(rounds):
        for name, run in runners.items():
            if found := run(shape):
                turns.setdefault(name, []).append(found)
                print_line(name, shape, found)
    return {name: {key: median(turn[key] for turn in found) for key in FIGURES}
            for name, found in turns.items()}  # fmt: skip


def print_line(name: str, shape: tuple[int, int, int], figures: dict) -> None:
    b, p, g = shape
    print(f"{name:10} B={b:<3} P={p:<5} G={g:<3} prefill {figures['prefill']:8.0f}  decode {figures['decode']:8.0f}"
          " tokens/s", flush=True)  # fmt: skip


def table(results: dict[tuple[int, int, int], dict[str, dict]]) -> list[dict]:
    """One row per shape and figure: everybody's tokens/s, and ours by the best of the others."""
    rows = []
    for shape, found in results.items():
        for figure in FIGURES:
            rates = {name: figures[figure] for name, figures in found.items()}
            others = [rate for name, rate in rates.items() if name != "kvledger"]
            ratio = rates["kvledger"] / max(others) if others and "kvledger" in rates else None
            rows.append({"shape": shape, "figure": figure, **rates, "ratio": ratio,
                         "floor": FLOORS.get((shape, figure))})  # fmt: skip
    return rows


def show(rows: list[dict], names: list[str]) -> None:
    print(f"\n| B, P, G | | {' | '.join(names)} | × best peer | floor |")
    print("| --- " * (len(names) + 4) + "|")
    for row in rows:
        rates = " | ".join(f"{row[name]:,.0f}" if name in row else "–" for name in names)
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        shape = ", ".join(map(str, row["shape"]))
        print(f"| {shape} | {row['figure']} | {rates} | {ratio} | {row['floor'] or ''} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--peer-python", help="interpreter that has the peers; without it only ours is measured")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--shapes", type=json.loads, default=SHAPES, help="as [[1,128,64],[8,128,32]]")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write rows and set-up here")
    args = parser.parse_args()
    from kvledger.weights.store import resolve

    path, shapes = resolve(args.model), [tuple(shape) for shape in args.shapes]
    runners = {"kvledger": partial(ours, args.model, threads=args.threads, kv_dtype=args.kv_dtype)}
    for name in PEERS if args.peer_python else ():
        runners[name] = partial(peer, name, args.peer_python, path, threads=args.threads)
    results = {shape: measure(shape, args.rounds, runners) for shape in shapes}
    rows = table(results)
    show(rows, [name for name in runners if any(name in found for found in results.values())])
    if args.json:
        setup = {
            "model": str(path.name),
            "threads": args.threads,
            "kv_dtype": args.kv_dtype,
            "rounds": args.rounds,
            "cpu": cpu_name(),
        }
        args.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
