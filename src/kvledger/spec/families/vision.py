"""Vision towers of multimodal files: their weights only. They keep no cache; images reach the text model as tokens.

Counted for the towers below; for others the caller notes that the tower is not counted. Sizes include the connector
to the text model.
"""

from __future__ import annotations

from collections.abc import Callable

from kvledger.spec.config_fields import MAX_LAYERS, Fields
from kvledger.spec.families.parts import Weights
from kvledger.spec.model import Weight


def _vector(size: int, count: int = 1) -> Weight:
    return Weight("vision", size, count=count)


def _matrix(rows: int, cols: int, *, bias: bool = False, count: int = 1) -> Weights:
    return [Weight("vision", rows, cols, count, "rows"), *([_vector(rows, count)] if bias else [])]


def _encoder(
    hidden: int, inner: int, layers: int, *, attention_bias: bool, mlp_bias: bool, norm_bias: bool, gated: bool = False
) -> Weights:
    """`layers` equal blocks: four attention matrices, an MLP, two norms."""
    weights = _matrix(hidden, hidden, bias=attention_bias, count=4 * layers)
    weights += _matrix(inner, hidden, bias=mlp_bias, count=(2 if gated else 1) * layers)
    weights += _matrix(hidden, inner, bias=mlp_bias, count=layers)
    return [*weights, _vector(hidden, (4 if norm_bias else 2) * layers)]


def _sizes(v: Fields) -> tuple[int, int, int]:
    """(hidden size, MLP size, layers)."""
    hidden = v.count("hidden_size", "embed_dim", "vt_hidden_size")
    inner = v.count_or(0, "intermediate_size", "vt_intermediate_size") or int(hidden * v.number_or(4, "mlp_ratio"))
    return hidden, inner, v.count("num_hidden_layers", "depth", "vt_num_hidden_layers", high=MAX_LAYERS)


def _patches(v: Fields) -> int:
    return (v.count("image_size") // v.count("patch_size")) ** 2


def _siglip(v: Fields, whole: Fields, text: int) -> Weights:
    """SigLIP with Gemma 3's connector: one matrix after a norm."""
    hidden, inner, layers = _sizes(v)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=True)
    weights += _matrix(hidden, 3 * v.count("patch_size") ** 2, bias=True) + _matrix(_patches(v), hidden)
    return [*weights, _vector(hidden, 2), *_matrix(text, hidden), _vector(hidden)]


def _pixtral(v: Fields, whole: Fields, text: int) -> Weights:
    """Pixtral with Mistral 3's connector: patches merged two by two, then two matrices."""
    hidden, inner, layers = _sizes(v)
    weights = _encoder(hidden, inner, layers, attention_bias=False, mlp_bias=False, norm_bias=False, gated=True)
    weights += [*_matrix(hidden, 3 * v.count("patch_size") ** 2), _vector(hidden, 2)]
    merge, bias = whole.count_or(2, "spatial_merge_size", low=1), whole.flag("multimodal_projector_bias")
    weights += _matrix(hidden, hidden * merge**2)
    return weights + _matrix(text, hidden, bias=bias) + _matrix(text, text, bias=bias)


def _merger(hidden: int, merge: int, out: int, norm_size: int) -> Weights:
    """Qwen's patch merger: norm, a square matrix over merged patches, and one to the text model."""
    joined = hidden * merge**2
    return [_vector(norm_size), *_matrix(joined, joined, bias=True), *_matrix(out, joined, bias=True)]


def _patch_volume(v: Fields) -> int:
    side, frames = (
        v.count_or(14, "patch_size", "spatial_patch_size", low=1),
        v.count_or(2, "temporal_patch_size", low=1),
    )
    return 3 * frames * side**2


def _qwen2_vl(v: Fields, whole: Fields, text: int) -> Weights:
    hidden, merge = v.count("embed_dim"), v.count_or(2, "spatial_merge_size", low=1)
    inner, layers = int(hidden * v.number_or(4, "mlp_ratio")), v.count("depth", high=MAX_LAYERS)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=True)
    return (
        weights
        + _matrix(hidden, _patch_volume(v))
        + _merger(hidden, merge, v.count_or(text, "hidden_size", low=1), 2 * hidden)
    )


def _qwen2_5_vl(v: Fields, whole: Fields, text: int) -> Weights:
    hidden, inner, layers = _sizes(v)
    merge = v.count_or(2, "spatial_merge_size", low=1)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=False, gated=True)
    return (
        weights
        + _matrix(hidden, _patch_volume(v))
        + _merger(hidden, merge, v.count_or(text, "out_hidden_size", low=1), hidden)
    )


def _qwen3_vl(v: Fields, whole: Fields, text: int) -> Weights:
    """Qwen3-VL and 3.5: learned positions; 3-VL has further mergers that feed earlier text layers (DeepStack)."""
    hidden, inner, layers = _sizes(v)
    merge, out = v.count_or(2, "spatial_merge_size", low=1), v.count_or(text, "out_hidden_size", low=1)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=True)
    weights += _matrix(hidden, _patch_volume(v), bias=True) + _matrix(v.count("num_position_embeddings"), hidden)
    weights += _merger(hidden, merge, out, 2 * hidden)
    for _ in v.counts("deepstack_visual_indexes") or []:
        weights += _merger(hidden, merge, out, 2 * hidden * merge**2)
    return weights


def _llama4(v: Fields, whole: Fields, text: int) -> Weights:
    hidden, inner, layers = _sizes(v)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=True)
    weights += _matrix(hidden, 3 * v.count("patch_size") ** 2) + _matrix(_patches(v) + 1, hidden)
    adapted = v.count_or(4096, "projector_output_dim", low=1)
    weights += _matrix(v.count_or(4096, "projector_input_dim", low=1), inner) + _matrix(adapted, adapted)
    return [*weights, _vector(hidden, 5), *_matrix(text, v.count("vision_output_dim"))]


def _moonvit(v: Fields, whole: Fields, text: int) -> Weights:
    """MoonViT of Kimi-VL and K2.5: a grid of learned positions, patches merged two by two."""
    hidden, inner, layers = _sizes(v)
    weights = _encoder(hidden, inner, layers, attention_bias=True, mlp_bias=True, norm_bias=True)
    weights += _matrix(hidden, 3 * v.count_or(14, "patch_size", low=1) ** 2, bias=True)
    grid = v.count_or(64, "init_pos_emb_height", low=1) * v.count_or(64, "init_pos_emb_width", low=1)
    weights += [*_matrix(grid, hidden), _vector(hidden, 4)]
    joined = 4 * hidden
    return weights + _matrix(joined, joined, bias=True) + _matrix(text, joined, bias=True)


def _mllama(v: Fields, whole: Fields, text: int) -> Weights:
    """Llama 3.2 Vision: local and gated global layers, positions per tile and aspect ratio."""
    hidden, inner, layers = _sizes(v)
    every = layers + v.count_or(8, "num_global_layers")
    weights = _encoder(hidden, inner, every, attention_bias=False, mlp_bias=True, norm_bias=True)
    tiles, ratios = v.count_or(4, "max_num_tiles", low=1), 1 + len(v.lists("supported_aspect_ratios") or range(8))
    patches = _patches(v) + 1
    weights += _matrix(hidden, 3 * v.count("patch_size") ** 2) + _matrix(patches, hidden)
    weights += _matrix(ratios, tiles * patches * hidden) + _matrix(ratios, tiles * hidden, count=2)
    gates = 3 + 2 * (every - layers)
    return [*weights, _vector(hidden, 5), _vector(gates), *_matrix(text, v.count("vision_output_dim"), bias=True)]


TOWERS: dict[str, Callable[[Fields, Fields, int], Weights]] = {
    "gemma3": _siglip, "mistral3": _pixtral, "qwen2_vl": _qwen2_vl, "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl, "qwen3_vl_moe": _qwen3_vl, "qwen3_5": _qwen3_vl, "qwen3_5_moe": _qwen3_vl,
    "llama4": _llama4, "kimi_vl": _moonvit, "kimi_k25": _moonvit, "mllama": _mllama,
}  # fmt: skip


def vision_weights(whole: Fields, text_hidden: int) -> tuple[Weights, str]:
    """Weights of the vision tower that the file describes, and a note where it has one that is not counted."""
    section = whole.section("vision_config")
    if section is None:
        return [], ""
    tower = TOWERS.get(whole.text("model_type"))
    if tower is None:
        return [], "the vision tower (and any other modality) is not counted among the parameters"
    return tower(section, whole, text_hidden), ""
