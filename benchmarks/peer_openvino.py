"""OpenVINO GenAI's continuous batching on a GGUF file: `python peer_openvino.py MODEL.gguf SHAPES THREADS`.

Its own defaults (8-bit KV) with prefix caching off. Decode is timed over the second half of the steps, when all
sequences write; prefill is what is left of the whole when the decode steps are taken away.
"""

import json
import random
import statistics
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def run(pipe, batch, prompt, output):
    rng = random.Random(0)
    config = genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output
    config.ignore_eos, config.do_sample = True, False
    handles = [
        pipe.add_request(i, ov.Tensor(np.array([[rng.randrange(100, 40000) for _ in range(prompt)]], np.int64)), config)
        for i in range(batch)
    ]
    steps, start = [], time.perf_counter()
    while pipe.has_non_finished_requests():
        begun = time.perf_counter()
        pipe.step()
        steps.append(time.perf_counter() - begun)
    total = time.perf_counter() - start
    del handles
    step = statistics.median(steps[-max(1, output // 2) :])
    prefill = total - sum(steps[-(output - 1) :])
    return {"prefill": batch * prompt / prefill, "decode": batch / step}


def main():
    path, shapes, threads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = 4, 2048, 256
    config.enable_prefix_caching, config.dynamic_split_fuse = False, True
    pipe = genai.ContinuousBatchingPipeline(path, config, "CPU", {"INFERENCE_NUM_THREADS": threads})
    run(pipe, 1, 16, 8)
    for shape in shapes:
        print(json.dumps(run(pipe, *shape)), flush=True)


main()
