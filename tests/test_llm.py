"""The library: prompts in every form, stop strings, choices, logprobs, beams; on a tiny random model."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvledger import LLM, SamplingParams
from kvledger.beam import BeamSearch, beam_params
from kvledger.errors import BadRequest, ConfigError, ContextTooLong, EngineDead, UnknownName
from kvledger.llm import engine_config
from kvledger.sched.sequence import Request
from kvledger.units import MIB
from tiny_model import write_tiny_model


def greedy(max_tokens, **kw):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **kw)


GREEDY = greedy(12)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("llm") / "tiny.gguf")
    with LLM(str(path), kv_memory="2MiB", max_num_batched_tokens=64, seed=5) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    llm.engine.step()
    llm.engine.scheduler.check()
    assert llm.books.num_used == 0
    assert not llm.metrics.live


def test_text_ids_and_messages(llm):
    ids = llm.tokenizer.encode("Hello")
    by_text, by_ids = llm.generate("Hello", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert by_text.outputs == by_ids.outputs
    assert (by_text.prompt, by_ids.prompt, by_ids.prompt_token_ids) == ("Hello", None, tuple(ids))
    messages = [{"role": "user", "content": "Hello"}]
    rendered = llm.loaded.template.render(messages)
    assert llm.chat(messages, GREEDY)[0].outputs == llm.generate(rendered, GREEDY)[0].outputs
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_a_batch_answers_in_order_as_each_would_alone(llm):
    prompts = ["one", "two two two", "three", [65, 66, 67]]
    together = llm.generate(prompts, GREEDY)
    assert [o.outputs for o in together] == [llm.generate(p, GREEDY)[0].outputs for p in prompts]
    different = llm.generate(prompts[:2], [GREEDY, greedy(3)])
    assert [len(o.outputs[0].token_ids) for o in different] == [12, 3]
    with pytest.raises(BadRequest, match="1 sampling parameters for 2"):
        llm.generate(prompts[:2], [GREEDY])


def test_one_bad_prompt_and_none_is_run(llm):
    with pytest.raises(ContextTooLong):
        llm.generate(["fine", "x" * 600], GREEDY)
    with pytest.raises(BadRequest, match="empty"):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        llm.generate([1, 100_000], GREEDY)
    assert llm.generate([], GREEDY) == []


def test_seeds_make_sampling_repeatable(llm):
    params = SamplingParams(temperature=1.2, max_tokens=10, seed=11, n=3)
    first, second = llm.generate("abc", params)[0], llm.generate("abc", params)[0]
    assert first.outputs == second.outputs
    assert len({o.token_ids for o in first.outputs}) == 3
    unseeded = SamplingParams(temperature=1.2, max_tokens=10)
    assert llm.generate("abc", unseeded)[0].outputs != llm.generate("abc", unseeded)[0].outputs


def test_stop_strings_across_tokens(llm):
    free = llm.generate("abc", greedy(40))[0]
    plain = free.text
    assert len(plain) > 12
    stop = plain[5:8]
    at = plain.index(stop)
    out = llm.generate("abc", greedy(40, stop=(stop, "never")))[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (plain[:at], "stop", stop)
    assert len(out.token_ids) < len(free.outputs[0].token_ids)
    kept = greedy(40, stop=(stop,), include_stop_str_in_output=True)
    assert llm.generate("abc", kept)[0].text == plain[: at + len(stop)]


def test_stop_token_ids_end_silently(llm):
    free = llm.generate("abc", GREEDY)[0].outputs[0]
    token = free.token_ids[4]
    params = greedy(12, stop_token_ids=(token,))
    out = llm.generate("abc", params)[0].outputs[0]
    end = free.token_ids.index(token)
    assert (out.token_ids, out.stop_reason) == (free.token_ids[: end + 1], token)
    assert out.text == llm.tokenizer.decode(free.token_ids[:end])


def test_logprobs_and_prompt_logprobs_agree(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    out = llm.generate("What", params)[0]
    assert all(s.rank == 1 and len(s.top) == 3 and s.top[0][0] == s.token_id for s in out.outputs[0].logprobs)
    whole = [*out.prompt_token_ids, *out.outputs[0].token_ids]
    scored = llm.generate(whole, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3))[0]
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(whole)
    assert scored.prompt_logprobs[-6:] == out.outputs[0].logprobs  # bit for bit: one chunk or six steps
    assert out.outputs[0].cumulative_logprob == pytest.approx(sum(s.logprob for s in out.outputs[0].logprobs))


def test_cached_tokens_and_times_are_reported(llm):
    prompt = "A long enough beginning, the same each time. " * 3
    llm.generate(prompt, GREEDY)
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == (len(again.prompt_token_ids) - 1) // 16 * 16
    assert 0 <= again.times.queue_s <= again.times.ttft_s <= again.times.e2e_s
    assert len(again.times.gaps_s) == 11


def test_streaming_gives_the_same_text_and_can_be_left(llm):
    whole = llm.generate("abc", GREEDY)[0].text
    assert "".join(llm.stream("abc", GREEDY)) == whole
    stream = llm.stream("abc", greedy(400))
    next(stream)
    stream.close()


def test_structured_output(llm):
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=1)
    (out,) = llm.generate("pick", params, structured={"choice": ["yes", "no"]})
    assert out.text in ("yes", "no")
    with pytest.raises(BadRequest):
        llm.generate("pick", params, structured={"regex": "("})


def brute_force_beams(llm, prompt, width, length):
    """Beam search from scratch: every beam's whole text computed anew in every round."""
    ids, beams = list(llm.encode(prompt)), [((), 0.0)]
    for _ in range(length):
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
        outs = llm.generate([ids + list(tokens) for tokens, _ in beams], params)
        grown = [
            ((*tokens, token), total + logprob)
            for (tokens, total), out in zip(beams, outs, strict=True)
            for token, logprob in out.outputs[0].logprobs[0].top
            if token not in llm.tokenizer.eos_token_ids
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return [tokens for tokens, _ in beams]


@pytest.mark.parametrize("width", [1, 3])
def test_beams_are_those_of_a_search_from_scratch(llm, width):
    found = llm.beam_search("What is", width, 8)[0]
    assert [b.token_ids for b in found if len(b.token_ids) == 8] == brute_force_beams(llm, "What is", width, 8)
    assert all(b.score == pytest.approx(b.logprob / len(b.token_ids)) for b in found)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_beams_of_a_quantised_cache_are_those_of_a_search_from_scratch(tmp_path, kv_dtype):
    """Forks copy a block that is partly sealed, and the residual's beside it; the prompt crosses a group of 32."""
    path = write_tiny_model(tmp_path / "tiny.gguf")
    with LLM(str(path), kv_memory="4MiB", kv_dtype=kv_dtype) as llm:
        prompt = "y" * 156  # the fourth of what follows completes the fifth group
        found = llm.beam_search(prompt, 3, 8)[0]
        assert [b.token_ids for b in found if len(b.token_ids) == 8] == brute_force_beams(llm, prompt, 3, 8)
        llm.engine.scheduler.check()


def test_beams_share_the_blocks_of_what_they_have_in_common(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf")
    with LLM(str(path), kv_memory="1MiB", prefix_caching=False) as llm:
        most = 0

        class Watch:
            def added(self, request, now_s): ...

            def stepped(self, report, events):
                nonlocal most
                most = max(most, llm.books.num_used)

        llm.engine.listeners.append(Watch())
        llm.beam_search("x" * 160, 6, 10)
        assert most < 10 + 6 * 3  # ten blocks of prompt, once; apart, six beams would hold 66
        assert llm.books.num_used == 0


def test_beams_of_a_tight_pool_are_the_same(tmp_path, llm):
    path = write_tiny_model(tmp_path / "tiny.gguf")
    with LLM(str(path), kv_memory=7 * 8192, max_num_batched_tokens=32) as tight:
        assert tight.loaded.pool.num_blocks == 7
        prompt = "y" * 60
        found = [b.token_ids for b in tight.beam_search(prompt, 4, 20)[0]]
        assert tight.metrics.totals.num_preemptions > 0
        tight.engine.scheduler.check()
    assert found == [b.token_ids for b in llm.beam_search(prompt, 4, 20)[0]]


def test_a_beam_search_that_fails_fails_its_caller_alone(llm, monkeypatch):
    """Whoever takes the step may be waiting for another request, and another search."""
    answer, beams, run = llm.generate("abc", GREEDY)[0].outputs, llm.beam_search("abc", 2, 8), llm.engine.executor.run

    def failing(step):
        result = run(step)
        bad = {c.seq.seq_id: "no numbers" for c in step.chunks if c.seq.params.logprobs == 6 and c.start > 20}
        return replace(result, samples={k: v for k, v in result.samples.items() if k not in bad}, failed=bad)

    monkeypatch.setattr(llm.engine.executor, "run", failing)
    request = Request("lost", (65,) * 20, beam_params(3, 8), stepwise=True)
    llm._searches.append(search := BeamSearch(llm.engine, request, 3))
    assert llm.generate("abc", GREEDY)[0].outputs == answer
    llm._searches.remove(search)
    with pytest.raises(BadRequest, match="no numbers"):
        search.best(llm.tokenizer)
    with pytest.raises(BadRequest, match="no numbers"):
        llm.beam_search([65] * 20, 3, 8)
    assert llm.beam_search("abc", 2, 8) == beams


def test_beam_width_is_checked(llm):
    with pytest.raises(BadRequest, match="beam width"):
        llm.beam_search("x", 65, 4)


def test_options_are_flat_and_checked():
    config = engine_config(kv_memory="64MiB", block_size=32, policy="orca", num_threads=1, max_model_len=100)
    assert (config.cache.kv_memory_bytes, config.cache.block_size) == (64 * MIB, 32)
    assert (config.sched.policy, config.exec.num_threads, config.max_model_len) == ("orca", 1, 100)
    with pytest.raises(UnknownName, match="max_num_seqs"):
        engine_config(max_num_seq=3)
    with pytest.raises(ConfigError):
        engine_config(block_size=17)


def test_a_context_beyond_the_models_is_refused(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="513 is not within 2 … 512"):
        LLM(str(path), kv_memory="1MiB", max_model_len=513)
    with LLM(str(path), kv_memory="1MiB", max_model_len=32) as short:
        out = short.generate("x" * 20, greedy(None))[0]
        assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (12, "length")
        assert not math.isnan(out.times.e2e_s)


WRONG = [
    {"max_tokens": 1.5}, {"n": 1.0}, {"temperature": "1"}, {"stop": 5}, {"stop": [1]}, {"stop_token_ids": "a"},
    {"seed": "a"}, {"logit_bias": {0: math.nan}}, {"logit_bias": {"a": 1.0}}, {"logit_bias": [1]},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_field_of_the_wrong_type_is_named(fields):
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {"role": "user"}, {1, 2}, [1.5], [None]], ids=repr)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(BadRequest, match="prompt"):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("structured", ["x", {}, {"jsn": {}}, {"choice": []}, {"json": {}, "regex": "a"}], ids=str)
def test_structured_output_that_is_none(llm, structured):
    with pytest.raises(BadRequest, match="structured"):
        llm.generate("a", GREEDY, structured=structured)


def test_calls_within_a_stream_take_nothing_from_it(llm):
    whole, other = "".join(llm.stream("abc", GREEDY)), llm.generate("xyz", GREEDY)[0].text
    stream = llm.stream("abc", GREEDY)
    begun = next(stream)
    assert llm.generate("xyz", GREEDY)[0].text == other
    assert llm.beam_search("xyz", 2, 4)
    assert begun + "".join(stream) == whole


def test_threads_call_at_once(llm):
    prompts = [f"prompt {i}" for i in range(6)]
    alone = [llm.generate(p, GREEDY)[0].outputs for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda p: llm.generate(p, GREEDY)[0].outputs, prompts, timeout=60))
    assert together == alone


def test_nothing_is_answered_after_the_end(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf")
    llm = LLM(str(path), kv_memory="1MiB")
    stream = llm.stream("abc", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for call in (lambda: next(stream), lambda: llm.generate("a", GREEDY), lambda: llm.beam_search("a", 2)):
        with pytest.raises(EngineDead):
            call()


@pytest.mark.parametrize(
    "option",
    [{"kv_memory": 1e9}, {"max_model_len": "8k"}, {"max_model_len": 100.5}, {"num_threads": -1}, {"kv_dtype": None},
     {"num_threads": 10**6}, {"num_threads": "2"}, {"activations": "x"}, {"max_num_seqs": 1.5}],
    ids=str,
)  # fmt: skip
def test_options_of_the_wrong_type(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        engine_config(**option)


@pytest.mark.parametrize(
    "option",
    [{"seed": [1]}, {"seed": "a"}, {"seed": True}, {"progress": 5}, {"model": None}, {"model": b"x"}, {"disk_dir": 5},
     {"prefix_caching": "no"}, {"chunked_prefill": None}, {"swap_bytes": None}, {"growth_tokens": None},
     {"max_num_seqs": None}, {"disk_bytes": -1}, {"disk_dir": ""}, {"disk_dir": " "}],
    ids=str,
)  # fmt: skip
def test_arguments_of_the_wrong_type_are_refused_before_anything_is_loaded(option, monkeypatch):
    monkeypatch.setattr("kvledger.llm.build_engine", None)
    with pytest.raises(ConfigError, match=next(iter(option))):
        LLM(**{"model": "smollm2", **option})


@pytest.mark.parametrize("option", [{"policy": 5}, {"queueing": "lifo"}], ids=str)
def test_unknown_policies_are_named(option):
    with pytest.raises(UnknownName, match=next(iter(option))):
        engine_config(**option)


def test_requests_of_the_wrong_type(llm):
    calls = [
        (lambda: llm.generate("a", 5), "params must be SamplingParams"),
        (lambda: llm.generate("a", [5]), "params must be SamplingParams"),
        (lambda: list(llm.stream("a", 5)), "params must be SamplingParams"),
        (lambda: llm.chat("hi"), "messages are a list of role and content"),
        (lambda: llm.chat([5]), "messages are a list"),
        (lambda: llm.chat(5), "prompts are text"),
        (lambda: llm.beam_search("a", 2, 2, "x"), "length_penalty"),
        (lambda: llm.generate("\ud800", GREEDY), "no UTF-8"),
        (lambda: SamplingParams(ignore_eos="x"), "ignore_eos must be True or False"),
        (lambda: SamplingParams(n=512), "n must be at least 1 and at most 128"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens must be at least 1"),
        (lambda: SamplingParams(min_tokens=5, max_tokens=2), "min_tokens 5 exceeds max_tokens 2"),
    ]
    for call, said in calls:
        with pytest.raises(BadRequest, match=said):
            call()


def test_ids_of_numpy(llm):
    import numpy as np

    ids = [65, 66, 67]
    assert llm.generate([np.int64(i) for i in ids], GREEDY)[0].outputs == llm.generate(ids, GREEDY)[0].outputs


@pytest.mark.parametrize("call", ["generate", "stream", "beam_search"])
def test_ctrl_c_leaves_nothing_behind(llm, monkeypatch, call):
    """Interrupted in the middle of a step's evaluation; the next request is answered as before."""
    before, steps, step = llm.generate("abc", GREEDY)[0].outputs, [], llm.engine.step

    def interrupted():
        steps.append(step())
        if len(steps) == 3:
            raise KeyboardInterrupt
        return steps[-1]

    monkeypatch.setattr(llm.engine, "step", interrupted)
    asked = {"generate": lambda: llm.generate(["abc"] * 3, GREEDY), "stream": lambda: list(llm.stream("abc", GREEDY)),
             "beam_search": lambda: llm.beam_search("abc", 3, 8)}  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        asked[call]()
    monkeypatch.undo()
    assert not llm._live
    assert not llm._searches
    assert llm.generate("abc", GREEDY)[0].outputs == before


def test_a_windows_few_blocks_serve_any_length(tmp_path):
    path, answers = write_tiny_model(tmp_path / "window.gguf", window=24), []
    for blocks in (100, 3):
        with LLM(path, kv_memory=blocks * 8192) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
            answers.append(llm.generate([[i % 250 for i in range(400)]], params)[0].outputs[0])
            assert llm.engine.scheduler.pool.num_blocks == blocks
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs
