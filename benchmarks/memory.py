"""What a model needs per GPU, by a formula. `python benchmarks/memory.py` prints its table.

With P parameters on N GPUs, H hidden, I intermediate, Q and K the widths of queries and keys, L
layers, V words and T tokens a micro-batch, in bytes:

    state        16 P / N               float32 weights and gradients, AdamW's two moments
    gathered     4 (P_layer 3 + P_rest 2)   with N > 1: two layers' weights and one's gradient, and
                                        the embedding, head and last norm with their gradients
    casts        2 P_linear             the bfloat16 copies that autocast keeps for the backward
    activations  T L (28 H + 8 I + 8 Q + 10 K)      what autograd saves of a layer, in autocast
    head         256 V 4 x 3 + 8 V H    a chunk's logits and what is made of them, the gradient
                                        and the bfloat16 copies of the head

Gradient checkpointing leaves of casts and activations those of one layer, and T L 4 H. While the
engine samples, there are no gradients, casts and activations, but its share of the GPU: at least
2 P, and its cache. A test checks activations and casts against what autograd saves of a tiny model.
"""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

MODELS = {
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen3-1.7B": Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-7B": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152_064,
    ),
}


def parts(config, processes, tokens=8192, checkpointing=False, chunk=256):
    """{part: bytes} of the update of a model with this configuration, on each GPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = sum(weight.numel() for weight in model.base_model.layers[0].parameters())
    linear = sum(w.numel() for w in model.base_model.layers[0].parameters() if w.ndim > 1)
    count, layers, hidden = model.num_parameters(), config.num_hidden_layers, config.hidden_size
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, key = width * config.num_attention_heads, width * config.num_key_value_heads
    token = 28 * hidden + 8 * config.intermediate_size + 8 * query + 10 * key
    kept = 1 if checkpointing else layers
    return {
        "state": 16 * count / processes,
        "gathered": 4 * (3 * layer + 2 * (count - layers * layer)) if processes > 1 else 0,
        "casts": 2 * linear * kept,
        "activations": tokens * (kept * token + checkpointing * layers * 4 * hidden),
        "head": config.vocab_size * (chunk * 4 * 3 + 8 * hidden),
    }


def table():
    """The README's table, in Markdown."""
    rows = ["| model | parameters | GPUs | update | with checkpointing | sampling, cache aside |"]
    rows.append("|---" * 6 + "|")
    for name, config in MODELS.items():
        with torch.device("meta"):
            count = AutoModelForCausalLM.from_config(config).num_parameters()
        for processes in (1, 2, 8):
            sizes = [sum(parts(config, processes, checkpointing=c).values()) for c in (False, True)]
            sizes.append(count * (12 / processes + 2))
            cells = " | ".join(f"{size / 2**30:.0f} GiB" for size in sizes)
            rows.append(f"| {name} | {count / 1e9:.2f} B | {processes} | {cells} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
