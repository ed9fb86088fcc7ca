"""All architectures in plain float32 numpy, from an open weights file alone: the slow, obvious version.

Says what the metadata keys and tensor layouts mean. No cache, no blocks: every token attends by a mask.
"""

import numpy as np

from kvledger.spec.from_gguf import Facts, is_window_layer
from kvledger.weights.quantised import dequantise


class Reference:
    """`logits(ids)` of the model in `weights` (see weights.open)."""

    def __init__(self, weights):
        self.weights = weights
        self.f = Facts(weights.metadata["general.architecture"], weights.metadata)
        self.gemma = self.f.arch.startswith("gemma")
        self.eps = self.number("attention.layer_norm_rms_epsilon")
        self.closest = np.inf  # least lead of a chosen expert, or group of them, over the next: in logits or in scores

    def number(self, key, default=0.0):
        value = self.f.metadata.get(f"{self.f.arch}.{key}", default)
        return float(value)

    def w(self, name):
        """A tensor as float32, or None."""
        tensor = self.weights.tensors.get(name)
        return None if tensor is None else dequantise(tensor.data, tensor.ggml_type, tensor.shape)

    def logits(self, ids):
        """float32[tokens, vocabulary]."""
        embedding = self.w("token_embd.weight")
        x = embedding[ids]
        if self.gemma:
            x = x * np.float32(np.sqrt(x.shape[1]))
        for i in range(self.f.count("block_count")):
            x = self.layer(i, x)
        head = self.w("output.weight")
        out = self.norm(x, self.w("output_norm.weight")) @ (embedding if head is None else head).T
        cap = self.number("final_logit_softcapping")
        return cap * np.tanh(out / cap) if cap else out

    def layer(self, i, x):
        p = f"blk.{i}."
        attend = self.latent_attention if self.f.has("attention.kv_lora_rank") else self.attention
        y = attend(i, self.norm(x, self.w(p + "attn_norm.weight")))
        x = x + (self.norm(y, self.w(p + "post_attention_norm.weight")) if self.gemma else y)
        normed = self.norm(x, self.w(p + "ffn_norm.weight"))
        y = self.experts(p, normed) if p + "ffn_gate_inp.weight" in self.weights.tensors else self.mlp(p, "", normed)
        return x + (self.norm(y, self.w(p + "post_ffw_norm.weight")) if self.gemma else y)

    def norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def linear(self, x, name):
        bias = self.w(name + ".bias")
        y = x @ self.w(name + ".weight").T
        return y if bias is None else y + bias

    # ------------------------------------------------------------------------------------------ attention

    def attention(self, i, x):
        """[tokens, hidden]; grouped heads, with window, soft cap and norms on queries and keys where there are any."""
        p, dim = f"blk.{i}.", self.f.key_dim(i)
        q, k, v = (self.linear(x, p + part).reshape(len(x), -1, dim) for part in ("attn_q", "attn_k", "attn_v"))
        if (weight := self.w(p + "attn_q_norm.weight")) is not None:
            q, k = self.norm(q, weight), self.norm(k, self.w(p + "attn_k_norm.weight"))
        window = self.window(i)
        pairs = self.f.arch == "llama"
        base = self.number("rope.freq_base_swa") if window and self.f.has("rope.freq_base_swa") else None
        q, k = (self.rotate(t, pairs, base) for t in (q, k))
        k, v = (np.repeat(t, q.shape[1] // t.shape[1], axis=1) for t in (k, v))
        mixed = self.mix(q, k, v, self.number("attention.scale", dim**-0.5), window)
        return self.linear(mixed, p + "attn_output")

    def window(self, i):
        """Tokens that layer i sees, 0 for all."""
        size = self.f.count("attention.sliding_window", 0)
        local = not self.gemma or is_window_layer(self.f, i, {"gemma2": 2, "gemma3": 6}[self.f.arch])
        return size if local else 0

    def mix(self, q, k, v, scale, window):
        """Causal softmax attention: [tokens, heads, dims] → [tokens, heads × dims]."""
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        if cap := self.number("attn_logit_softcapping"):
            scores = cap * np.tanh(scores / cap)
        distance = np.arange(len(q))[:, None] - np.arange(len(k))
        hidden = (distance < 0) | ((distance >= window) if window else False)
        weights = softmax(np.where(hidden, -np.inf, scores))
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)

    def latent_attention(self, i, x):
        """MLA, unabsorbed: keys and values of every head unfolded from the latent."""
        p, heads = f"blk.{i}.", self.f.count("attention.head_count")
        latent, rope = self.f.count("attention.kv_lora_rank"), self.f.count("rope.dimension_count")
        if self.f.has("attention.q_lora_rank"):
            q = self.linear(
                self.norm(self.linear(x, p + "attn_q_a"), self.w(p + "attn_q_a_norm.weight")), p + "attn_q_b"
            )
        else:
            q = self.linear(x, p + "attn_q")
        q = q.reshape(len(x), heads, -1)
        kv = self.linear(x, p + "attn_kv_a_mqa")
        c = self.norm(kv[:, :latent], self.w(p + "attn_kv_a_norm.weight"))
        k_rope = np.repeat(self.rotate(kv[:, None, latent:], True), heads, axis=1)
        k_nope = np.einsum("tc,hcd->thd", c, self.w(p + "attn_k_b.weight"))  # k_b: [heads, latent, nope]
        v = np.einsum("tc,hdc->thd", c, self.w(p + "attn_v_b.weight"))  # v_b: [heads, value, latent]
        q = np.concatenate([q[..., :-rope], self.rotate(q[..., -rope:], True)], axis=-1)
        k = np.concatenate([k_nope, k_rope], axis=-1)
        stretch = 1 + self.number("rope.scaling.yarn_log_multiplier") * np.log(self.number("rope.scaling.factor", 1.0))
        mixed = self.mix(q, k, v, q.shape[-1] ** -0.5 * stretch**2, 0)
        return self.linear(mixed, p + "attn_output")

    # ------------------------------------------------------------------------------------------ rope

    def rotate(self, x, pairs, base=None):
        """Rope on [tokens, heads, dims]; `pairs`: neighbouring channels turn together, else the halves of a head."""
        dim = x.shape[-1]
        freqs, magnitude = self.frequencies(dim, base)
        angle = np.arange(len(x))[:, None, None] * freqs
        cos, sin = magnitude * np.cos(angle), magnitude * np.sin(angle)
        a, b = (x[..., 0::2], x[..., 1::2]) if pairs else (x[..., : dim // 2], x[..., dim // 2 :])
        turned = a * cos - b * sin, a * sin + b * cos
        out = np.stack(turned, -1).reshape(x.shape) if pairs else np.concatenate(turned, -1)
        return out.astype(np.float32)

    def frequencies(self, dim, base):
        """(radians per token of each pair, factor on the result)."""
        base_of_model = self.number("rope.freq_base", 10000.0)
        freqs = (base or base_of_model) ** (-np.arange(0, dim, 2) / dim)
        kind, factor = self.f.metadata.get(f"{self.f.arch}.rope.scaling.type"), self.number("rope.scaling.factor", 1.0)
        if base is not None:
            return freqs, 1.0
        if (factors := self.w("rope_freqs.weight")) is not None:
            return freqs / factors, 1.0
        if kind == "yarn":
            magnitude = 1.0 if self.f.has("attention.kv_lora_rank") else 1 + 0.1 * np.log(factor)
            return self.yarn(freqs, dim, base_of_model, factor), magnitude
        return freqs / factor, 1.0

    def yarn(self, freqs, dim, base, factor):
        """YaRN (arXiv:2309.00071): slow channels are stretched, fast ones left alone, those between by a ramp."""
        trained = self.f.count("rope.scaling.original_context_length")

        def channel(turns):
            return dim * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(base))

        low = max(np.floor(channel(self.number("rope.scaling.yarn_beta_fast", 32.0))), 0)
        high = min(np.ceil(channel(self.number("rope.scaling.yarn_beta_slow", 1.0))), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return freqs / factor * ramp + freqs * (1 - ramp)

    # ------------------------------------------------------------------------------------------ feed-forward

    def activate(self, gate):
        if self.gemma:
            return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return gate / (1 + np.exp(-gate))

    def mlp(self, p, kind, x):
        gate, up, down = (self.w(f"{p}ffn_{part}{kind}.weight") for part in ("gate", "up", "down"))
        return (self.activate(x @ gate.T) * (x @ up.T)) @ down.T

    def experts(self, p, x):
        """The chosen experts' answers, weighted; and the shared expert's."""
        gate, up, down = (self.w(f"{p}ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        out = np.zeros_like(x)
        for t, (chosen, weights) in enumerate(self.route(p, x)):
            for e, weight in zip(chosen, weights, strict=True):
                out[t] += weight * (down[e] @ (self.activate(gate[e] @ x[t]) * (up[e] @ x[t])))
        if p + "ffn_gate_shexp.weight" in self.weights.tensors:
            shared = self.mlp(p, "_shexp", x)
            if (weight := self.w(p + "ffn_gate_inp_shexp.weight")) is not None:
                shared = shared / (1 + np.exp(-(x @ weight.reshape(1, -1).T)))
            out = out + shared
        return out

    def route(self, p, x):
        """Per token (experts, weights)."""
        used, sigmoid = self.f.count("expert_used_count"), self.f.count("expert_gating_func", 1) == 2
        score = x @ self.w(p + "ffn_gate_inp.weight").T
        score = 1 / (1 + np.exp(-score)) if sigmoid else softmax(score)
        bias = self.w(p + "exp_probs_b.bias")
        choice = self.keep_groups(score if bias is None else score + bias, sigmoid)
        self.note_lead(choice, used, sigmoid)
        for row, ranked in zip(score, np.argsort(-choice, axis=1, kind="stable"), strict=True):
            chosen = ranked[:used]
            weights = row[chosen]
            if self.f.metadata.get(f"{self.f.arch}.expert_weights_norm"):
                weights = weights / weights.sum()
            yield chosen, weights * self.number("expert_weights_scale", 1.0)

    def note_lead(self, values, count, sigmoid):
        values = values if sigmoid else np.log(np.maximum(values, 1e-30))
        ranked = -np.sort(-values, axis=1)
        self.closest = min(self.closest, (ranked[:, count - 1] - ranked[:, count]).min())

    def keep_groups(self, choice, sigmoid):
        """DeepSeek: only experts of the best groups; a group counts its best score, in V3 its best two."""
        groups, kept = self.f.count("expert_group_count", 1), self.f.count("expert_group_used_count", 1)
        if groups <= 1:
            return choice
        by_group = choice.reshape(len(choice), groups, -1)
        value = np.sort(by_group, axis=-1)[..., -2:].sum(-1) if sigmoid else by_group.max(-1)
        self.note_lead(value, kept, sigmoid)
        best = np.argsort(-value, axis=1, kind="stable")[:, :kept]
        mask = np.zeros_like(value, bool)
        np.put_along_axis(mask, best, True, axis=1)
        return np.where(mask[..., None], by_group, -np.inf).reshape(choice.shape)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
