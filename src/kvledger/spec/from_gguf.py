"""A GGUF header → ModelSpec: what each layer keeps, and exactly how many weights and bytes it has.

Counts come from the tensor shapes in the file, caches from the metadata. Knows how the architectures below lay out
their caches; whether this engine can compute them is for `model.registry` to say. Reads no file itself.
Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; window patterns and state sizes as llama.cpp's
llama-model.cpp and llama-hparams.cpp have them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from kvledger.errors import DamagedFile, UnsupportedModel, nearest
from kvledger.spec.gguf_shapes import check_shapes
from kvledger.spec.kv import CacheSpec, ChunkedKV, FullKV, LatentKV, StateKV, WindowKV
from kvledger.spec.model import Layer, ModelSpec

TensorFacts = tuple[tuple[int, ...], str, int]  # shape (rows first), ggml type, bytes

MAX_LAYERS = 1024
_MAX_COUNT = 1 << 40
_BLOCK = re.compile(r"blk\.(\d{1,4})\.(.+)")
_STACKED_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
_SINGLE_EXPERT = re.compile(r"ffn_(gate|up|down)\.\d+\.weight")  # files of before 2024-04
_QKV = re.compile(r"attn_(norm|qkv|[qkv](_norm)?|q_[ab]|q_a_norm|kv_a_mqa|kv_a_norm|k_b)\.(weight|bias)")
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Facts:
    """Typed look-up in the metadata; keys are written without the architecture in front."""

    arch: str
    metadata: Mapping[str, object]

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.metadata

    def count(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """A whole number ≥ 0, of `layer` where the file has one per layer. Raises DamagedFile, naming the key."""
        name = f"{self.arch}.{key}"
        value = self.metadata.get(name, default)
        if value is None:
            raise DamagedFile(f"the metadata has no {name!r}")
        if isinstance(value, list):
            if layer >= len(value):
                raise DamagedFile(f"{name!r} has {len(value)} values; layer {layer} needs one more")
            value = value[layer]
        if not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
            raise DamagedFile(f"{name!r} is {value!r}, not a whole number")
        return int(value)

    def positive(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """As `count`, and not 0."""
        value = self.count(key, default, layer)
        if value == 0:
            raise DamagedFile(f"'{self.arch}.{key}' is 0")
        return value

    def key_dim(self, layer: int, window: bool = False) -> int:
        """Dimensions of one key head."""
        return self._head_dim("key", layer, window)

    def value_dim(self, layer: int, window: bool = False) -> int:
        """Dimensions of one value head."""
        return self._head_dim("value", layer, window)

    def _head_dim(self, part: str, layer: int, window: bool) -> int:
        if window and self.has(f"attention.{part}_length_swa"):
            return self.positive(f"attention.{part}_length_swa", layer=layer)
        if self.has(f"attention.{part}_length"):
            return self.positive(f"attention.{part}_length", layer=layer)
        return self.positive("embedding_length") // self.positive("attention.head_count", layer=layer)


# ---------------------------------------------------------------------------------------------- caches by family

CacheRule = Callable[[Facts, int], CacheSpec | None]


def _full(facts: Facts, layer: int) -> CacheSpec | None:
    """Every token. A layer with no KV heads keeps nothing (DeciLM drops attention from some)."""
    heads = facts.count("attention.head_count", layer=layer)
    kv_heads = facts.count("attention.head_count_kv", heads, layer)
    return FullKV(kv_heads, facts.key_dim(layer), facts.value_dim(layer)) if kv_heads else None


def _all_windows(facts: Facts, layer: int) -> CacheSpec | None:
    """A window in every layer, where the file names one shorter than the context (Mistral 0.1, Phi-3)."""
    window = facts.count("attention.sliding_window", 0)
    spec = _full(facts, layer)
    if not isinstance(spec, FullKV) or not 0 < window < facts.positive("context_length"):
        return spec
    return WindowKV(spec.num_kv_heads, spec.key_dim, spec.value_dim, window)


def is_window_layer(facts: Facts, layer: int, period: int) -> bool:
    """Whether `layer` has a window: by the file's own pattern, else all but the last of every `period` layers."""
    pattern = facts.metadata.get(f"{facts.arch}.attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        return bool(facts.count("attention.sliding_window_pattern", layer=layer))
    if not isinstance(pattern, int) or pattern < 0:
        raise DamagedFile(f"'{facts.arch}.attention.sliding_window_pattern' is {pattern!r}")
    return pattern == 0 or layer % pattern < pattern - 1


def _interleaved(period: int) -> CacheRule:
    """Windows, but the last layer of every `period` sees everything (Gemma 2: 2, Gemma 3: 6)."""

    def rule(facts: Facts, layer: int) -> CacheSpec | None:
        window = facts.count("attention.sliding_window", 0)
        if window == 0 or not is_window_layer(facts, layer, period):
            return _full(facts, layer)
        kv_heads = facts.count("attention.head_count_kv", facts.count("attention.head_count", layer=layer), layer)
        return WindowKV(kv_heads, facts.key_dim(layer, True), facts.value_dim(layer, True), window)

    return rule


def _shared_tail(period: int, own_layers: int | None) -> CacheRule:
    """As interleaved; the last layers read an earlier layer's cache and keep none (Gemma 3n, Gemma 4)."""
    inner = _interleaved(period)

    def rule(facts: Facts, layer: int) -> CacheSpec | None:
        num_layers = facts.positive("block_count")
        default = max(0, num_layers - own_layers) if own_layers else 0
        shared = facts.count("attention.shared_kv_layers", default)
        return None if layer >= num_layers - shared else inner(facts, layer)

    return rule


def _llama4(facts: Facts, layer: int) -> CacheSpec | None:
    """Chunks of 8,192 positions, but every fourth layer sees everything; a window of 0 in the file switches it off."""
    spec = _full(facts, layer)
    off = facts.has("attention.sliding_window") and facts.count("attention.sliding_window") == 0
    if off or layer % 4 == 3 or not isinstance(spec, FullKV):
        return spec
    return ChunkedKV(spec.num_kv_heads, spec.key_dim, spec.value_dim, 8192)


def _latent(facts: Facts, layer: int) -> CacheSpec | None:
    """MLA: the latent and the shared rope key."""
    return LatentKV(facts.positive("attention.kv_lora_rank"), facts.positive("rope.dimension_count"))


def _state(facts: Facts) -> CacheSpec:
    """Mamba, Mamba 2 or gated delta net: convolution window and recurrent state, both float32 as in llama.cpp."""
    inner, state = facts.positive("ssm.inner_size"), facts.positive("ssm.state_size")
    channels = inner + 2 * facts.count("ssm.group_count", 0) * state
    window = max(0, facts.positive("ssm.conv_kernel") - 1)
    return StateKV(((window * channels, 4, channels), (inner * state, 4, inner)))


def _mamba(facts: Facts, layer: int) -> CacheSpec | None:
    return _state(facts)


def _hybrid(facts: Facts, layer: int) -> CacheSpec | None:
    """State where the layer has no KV heads, else attention; a layer with a feed-forward alone keeps nothing."""
    if facts.count("attention.head_count_kv", layer=layer):
        return _full(facts, layer)
    ffn_per_layer = isinstance(facts.metadata.get(f"{facts.arch}.feed_forward_length"), list)
    return None if ffn_per_layer and facts.count("feed_forward_length", layer=layer) else _state(facts)


def _delta_net(facts: Facts, layer: int) -> CacheSpec | None:
    """Qwen3-Next: every `full_attention_interval`-th layer has attention, the others a gated delta net."""
    interval = facts.positive("full_attention_interval", 4)
    return _full(facts, layer) if (layer + 1) % interval == 0 else _state(facts)


def _short_conv(facts: Facts, layer: int) -> CacheSpec | None:
    """LFM2: a short convolution where the layer has no KV heads."""
    if facts.count("attention.head_count_kv", layer=layer):
        return _full(facts, layer)
    width = facts.positive("embedding_length")
    return StateKV((((facts.positive("shortconv.l_cache") - 1) * width, 4, width),))


_FULL_NAMES = [
    "qwen", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "deci", "falcon", "baichuan",
    "grok", "gpt2", "gptj", "gptneox", "mpt", "starcoder", "starcoder2", "refact", "bloom", "stablelm", "phi2",
    "phimoe", "plamo", "codeshell", "orion", "internlm2", "minicpm", "gemma", "xverse", "command-r", "dbrx", "olmo",
    "olmoe", "openelm", "arctic", "deepseek", "chatglm", "glm4", "glm4moe", "bitnet", "jais", "nemotron", "exaone",
    "granite", "granitemoe", "chameleon", "bailingmoe", "bailingmoe2", "dots1", "arcee", "ernie4_5", "ernie4_5-moe",
    "hunyuan-moe", "hunyuan-dense", "smollm3", "seed_oss", "apertus", "minimax-m2", "mistral3",
]  # fmt: skip
CACHE_RULES: dict[str, CacheRule] = {
    **dict.fromkeys(_FULL_NAMES, _full),
    "llama": _all_windows, "mistral": _all_windows, "phi3": _all_windows,
    "gemma2": _interleaved(2), "gemma3": _interleaved(6), "cohere2": _interleaved(4), "gpt-oss": _interleaved(2),
    "olmo2": _interleaved(4), "exaone4": _interleaved(4),
    "gemma3n": _shared_tail(5, own_layers=20), "gemma4": _shared_tail(6, own_layers=None),
    "llama4": _llama4, "deepseek2": _latent,
    "mamba": _mamba, "mamba2": _mamba, "jamba": _hybrid, "granitehybrid": _hybrid, "nemotron_h": _hybrid,
    "nemotron_h_moe": _hybrid, "qwen3next": _delta_net, "qwen35": _delta_net, "qwen35moe": _delta_net,
    "lfm2": _short_conv, "lfm2moe": _short_conv,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- the model


def model_from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, TensorFacts], source: str = ""
) -> ModelSpec:  # fmt: skip
    """The model that a GGUF header describes.

    `tensors` are name → (shape rows first, type, bytes). Raises UnsupportedModel for an architecture without a rule,
    DamagedFile where the metadata lacks a key (named) or the tensors contradict it.
    """
    facts = Facts(architecture(metadata), metadata)
    draft = facts.count("nextn_predict_layers", 0)
    num_layers = _num_layers(facts) - draft
    by_layer, outside = _sort_tensors(tensors)
    missing = next((i for i in range(num_layers) if i not in by_layer), None)
    if num_layers < 1 or missing is not None:
        raise DamagedFile(f"{num_layers} layers announced, but layer {missing or 0} has no tensors")
    check_shapes(facts, tensors, num_layers)
    rule = CACHE_RULES[facts.arch]
    embedding = outside.pop("token_embd.weight", None)
    if embedding is None:
        raise DamagedFile("there is no tensor 'token_embd.weight'")
    head = outside.pop("output.weight", None)
    return ModelSpec(
        name=str(metadata.get("general.name") or source or facts.arch),
        architecture=facts.arch,
        hidden_size=facts.positive("embedding_length"),
        vocab_size=embedding[0][0],
        max_context=facts.positive("context_length"),
        layers=tuple(_layer(facts, i, by_layer[i], rule(facts, i)) for i in range(num_layers)),
        num_heads=_num_heads(facts, num_layers),
        embedding_params=prod(embedding[0]),
        head_params=prod(head[0]) if head else 0,
        other_params=sum(prod(shape) for name, (shape, _, _) in outside.items() if name not in _NOT_WEIGHTS),
        dtype=_main_type(tensors),
        weight_bytes=sum(num_bytes for _, _, num_bytes in tensors.values()),
        trained_context=facts.count("rope.scaling.original_context_length", 0) or None,
        draft_layers=draft,
        source=source,
        notes=(f"{draft} draft layers are in weight_bytes, not in the parameter counts",) if draft else (),
    )


def architecture(metadata: Mapping[str, object]) -> str:
    """`general.architecture`, checked against CACHE_RULES. Raises DamagedFile, UnsupportedModel."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise DamagedFile("the metadata has no 'general.architecture'")
    if arch not in CACHE_RULES:
        close = nearest(arch, CACHE_RULES)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise UnsupportedModel(f"unknown architecture {arch!r}{hint}; known: {', '.join(sorted(CACHE_RULES))}")
    return arch


def _num_layers(facts: Facts) -> int:
    count = facts.positive("block_count")
    if count > MAX_LAYERS:
        raise DamagedFile(f"'{facts.arch}.block_count' is {count:,}; {MAX_LAYERS:,} are accepted")
    return count


def _num_heads(facts: Facts, num_layers: int) -> int:
    """The most query heads of any layer; 0 for a model without attention."""
    return max(facts.count("attention.head_count", 0, layer=i) for i in range(num_layers))


def _sort_tensors(
    tensors: Mapping[str, TensorFacts],
) -> tuple[dict[int, dict[str, TensorFacts]], dict[str, TensorFacts]]:
    """(layer → name without the layer → facts, all others by name)."""
    by_layer: dict[int, dict[str, TensorFacts]] = {}
    outside: dict[str, TensorFacts] = {}
    for name, facts in tensors.items():
        if match := _BLOCK.fullmatch(name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = facts
        else:
            outside[name] = facts
    return by_layer, outside


def _layer(facts: Facts, index: int, tensors: Mapping[str, TensorFacts], cache: CacheSpec | None) -> Layer:
    sizes = {name: prod(shape) for name, (shape, _, _) in tensors.items() if name not in _NOT_WEIGHTS}
    routed = sum(n for name, n in sizes.items() if _STACKED_EXPERTS.fullmatch(name) or _SINGLE_EXPERT.fullmatch(name))
    num_experts = facts.positive("expert_count") if routed else 0
    used = facts.positive("expert_used_count") if routed else 0
    if used > num_experts:
        raise DamagedFile(f"{used} experts per token of {num_experts}")
    heads = facts.count("attention.head_count", 0, layer=index)
    key_dim, value_dim = _attention_dims(facts, index, cache)
    latent = cache if isinstance(cache, LatentKV) else None
    return Layer(
        cache=cache,
        params=sum(sizes.values()),
        score_dims=heads * key_dim,
        mix_dims=heads * value_dim,
        latent_score_dims=heads * (latent.latent_dim + latent.rope_dim) if latent else 0,
        latent_mix_dims=heads * latent.latent_dim if latent else 0,
        num_experts=num_experts,
        experts_per_token=used,
        expert_params=routed // num_experts if routed else 0,
        qkv_params=sum(n for name, n in sizes.items() if _QKV.fullmatch(name)),
    )


def _attention_dims(facts: Facts, index: int, cache: CacheSpec | None) -> tuple[int, int]:
    """Dimensions of one query head in q·k and in p·v; for a latent, of the expanded heads."""
    if isinstance(cache, FullKV):
        return cache.key_dim, cache.value_dim
    if isinstance(cache, LatentKV):
        key_dim = facts.positive("attention.key_length_mla", facts.key_dim(index))
        return key_dim, facts.positive("attention.value_length_mla", facts.value_dim(index))
    reads_another = cache is None and facts.count("attention.shared_kv_layers", 0) > 0
    return (facts.key_dim(index), facts.value_dim(index)) if reads_another else (0, 0)


def _main_type(tensors: Mapping[str, TensorFacts]) -> str:
    """The type that most weights have, in lower case."""
    counts: Counter[str] = Counter()
    for shape, kind, _ in tensors.values():
        counts[kind] += prod(shape)
    return counts.most_common(1)[0][0].lower() if counts else "f32"
