"""common.token_logprobs against log_softmax + gather: extra memory and time, forward and backward.

    python benchmarks/logprobs.py [positions] [words] [hidden]

Each runs in a process of its own, three times in turn, once at other sizes than the default; what
is printed are the best times, and the highest resident memory over that before the first run.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def make(positions, words, hidden, device="cpu", dtype=None):
    """(a model of one layer, token ids, mask) with so many positions to score."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(device, dtype)
    input_ids = torch.randint(words, (8, positions // 8 + 1)).to(device)
    return model, input_ids, torch.ones_like(input_ids[:, 1:], dtype=torch.bool)


def naive(model, input_ids, mask):
    """Log-probs and entropies (B, T-1) with all logits at once."""
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    logprobs = model.lm_head(hidden).float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, input_ids[:, 1:, None])[..., 0], entropy


def measure(kind, positions, words, hidden):
    """{"seconds", "mib", "gradient"} of forward and backward of `kind`, in this process."""
    import common

    model, input_ids, mask = make(positions, words, hidden)
    function = naive if kind == "naive" else common.token_logprobs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    logprobs, entropy = function(model, input_ids, mask)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "gradient": sum(p.grad.double().norm().item() ** 2 for p in model.parameters()) ** 0.5,
    }


def main():
    sizes = [int(size) for size in sys.argv[1:]] or [4096, 151_936, 896]
    best = {}
    for _ in range(1 if sys.argv[1:] else 3):
        for kind in ("naive", "ours"):
            command = [sys.executable, __file__, kind, *map(str, sizes)]
            done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            if kind not in best or done["seconds"] < best[kind]["seconds"]:
                best[kind] = done
    print("{} positions x {} words x hidden {}, float32".format(*sizes))
    for kind, name in (("naive", "log_softmax + gather"), ("ours", "common.token_logprobs")):
        row = best[kind]
        print(f"{name:24} {row['seconds']:8.2f} s {row['mib']:8.0f} MiB  |g| {row['gradient']:.6g}")
    seconds, mib = (best["ours"][key] / best["naive"][key] for key in ("seconds", "mib"))
    print(f"{'ratio':24} {seconds:8.2f}   {mib:8.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["naive"], ["ours"]):
        print(json.dumps(measure(sys.argv[1], *map(int, sys.argv[2:]))))
    else:
        main()
