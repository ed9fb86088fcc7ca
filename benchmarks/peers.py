"""Ours and its peers on the same file, the same shapes, the same machine, one after the other; ratios at the end.

    python benchmarks/peers.py --model smollm2 --peer-python ~/peers/bin/python --json results/peers.json

`--peer-python` is an interpreter that can import llama_cpp or openvino_genai (the `peers` extra installs both); a peer
that cannot be imported is left out and named. Every runner answers `B` sequences of `P` random prompt tokens with `G`
tokens each, greedy, without an early end, and prints one JSON line per shape. Absolute figures of a shared machine
drift: quote the ratios of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

SHAPES = [(1, 128, 64), (1, 512, 64), (8, 128, 32), (16, 128, 32), (32, 128, 32), (64, 128, 32), (1, 2048, 32)]
# (batch, prompt, output), figure → how many times the best peer ours should be
FLOORS = {
    ((1, 128, 64), "decode"): 1.5, ((1, 512, 64), "prefill"): 2.0, ((1, 2048, 32), "prefill"): 2.0,
    ((8, 128, 32), "decode"): 2.0, ((32, 128, 32), "decode"): 2.0, ((64, 128, 32), "decode"): 3.0,
}  # fmt: skip
PEERS = {"llama.cpp": "peer_llamacpp.py", "openvino": "peer_openvino.py"}
HERE = Path(__file__).parent


def ours(model: str, shapes: list[tuple[int, int, int]], threads: int, **options: object) -> list[dict]:
    from kvledger.bench.engine import load_for, measure

    loaded = load_for(model, shapes, num_threads=threads, **options)
    found = []
    for shape in shapes:
        result = measure(loaded, *shape)
        found.append({"prefill": result.prefill_tokens_per_s, "decode": result.decode_tokens_per_s,
                      "ceiling": result.ceiling_decode, "overhead": result.overhead})  # fmt: skip
        print_line("kvledger", shape, found[-1])
    loaded.engine.close()
    return found


def peer(name: str, python: str, path: Path, shapes: list[tuple[int, int, int]], threads: int) -> list[dict]:
    """The runner's lines, or nothing (and why) where it cannot run."""
    command = [python, str(HERE / PEERS[name]), str(path), json.dumps(shapes), str(threads)]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                print_line(name, shapes[len(found) - 1], found[-1])
        errors = process.stderr.read() if process.stderr else ""
    if process.returncode or len(found) < len(shapes):
        last = errors.strip().splitlines()[-1:] or ["no output"]
        print(f"{name}: left out after {len(found)} shapes ({last[0]})", file=sys.stderr)
    return found


def print_line(name: str, shape: tuple[int, int, int], figures: dict) -> None:
    b, p, g = shape
    print(f"{name:10} B={b:<3} P={p:<5} G={g:<3} prefill {figures['prefill']:8.0f}  decode {figures['decode']:8.0f}"
          " tokens/s", flush=True)  # fmt: skip


def table(shapes: list[tuple[int, int, int]], results: dict[str, list[dict]]) -> list[dict]:
    """One row per shape and figure: everybody's tokens/s, and ours by the best of the others."""
    rows = []
    for index, shape in enumerate(shapes):
        for figure in ("prefill", "decode"):
            rates = {name: found[index][figure] for name, found in results.items() if index < len(found)}
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
    parser.add_argument("--json", type=Path, help="write rows and set-up here")
    args = parser.parse_args()
    from kvledger.weights.store import resolve

    path, shapes = resolve(args.model), [tuple(shape) for shape in args.shapes]
    results = {"kvledger": ours(args.model, shapes, args.threads, kv_dtype=args.kv_dtype)}
    for name in PEERS if args.peer_python else ():
        if found := peer(name, args.peer_python, path, shapes, args.threads):
            results[name] = found
    rows = table(shapes, results)
    show(rows, list(results))
    if args.json:
        setup = {"model": str(path.name), "threads": args.threads, "kv_dtype": args.kv_dtype, "cpu": cpu_name()}
        args.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
