"""One update of grpo.py against TRL's GRPO: the same model, rollouts and trained tokens.

    pip install --no-deps trl==1.16.0
    python benchmarks/update.py [model folder] [rows] [longest completion]

Each runs in a process of its own, three times in turn. Both compute in float32 and make one update
of the whole batch with AdamW, eight rows at a time: grpo.py with --minibatches 1 --mismatch-cap 0,
and the log-probs of before known. Printed are the best time of an update and the highest resident
memory over that before the first.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PROMPT = 32


def make_rollouts(vocabulary, rows, longest):
    """(prompts, completions, advantages): completions of all lengths up to `longest`."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, vocabulary) for _ in range(PROMPT)] for _ in range(rows)]
    lengths = [max(1, int(longest * rng.betavariate(1.5, 2.5))) for _ in range(rows)]
    lengths[0] = longest
    completions = [[rng.randrange(10, vocabulary) for _ in range(n)] for n in lengths]
    return prompts, completions, [1.0 if i % 2 else -1.0 for i in range(rows)]


def ours(folder, rows, longest):
    """A function that makes one update with grpo.py, eight rows in a micro-batch."""
    import torch
    import torch.distributed as dist

    import common
    import grpo

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = grpo.load_model(grpo.AutoModelForCausalLM, folder, torch.float32)
    model = grpo.shard(model, torch.device("cpu"), torch.float32)
    optimizer = grpo.make_optimizer(model)
    optimizer.param_groups[0]["lr"] = 1e-6
    prompts, completions, advantages = make_rollouts(model.config.vocab_size, rows, longest)
    args = grpo.Args(minibatches=1, micro_batch_size=8, mismatch_cap=0.0)

    input_ids, mask = common.collate(prompts, completions, 0)
    batch = {"input_ids": input_ids, "mask": mask}
    batch["advantages"] = torch.tensor(advantages)[:, None]
    batch["old_logprobs"], _ = grpo.score_tokens(model, batch, args)  # TRL's are the update's own
    batch["engine_logprobs"] = batch["old_logprobs"]

    def update():
        metrics = grpo.update(model, optimizer, batch, args)
        return metrics["policy/grad_norm"], mask.sum().item()

    return update


def trl(folder, rows, longest):
    """A function that makes one update with TRL's trainer, eight rows in a micro-batch."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, completions, advantages = make_rollouts(model.config.vocab_size, rows, longest)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=rows // 8,
        num_generations=8,
        beta=0.0,
        loss_type="grpo",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "1"}] * rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = rows // 8
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)
    model.train()

    def update():
        ids = torch.zeros(rows, longest, dtype=torch.long)
        mask = torch.zeros(rows, longest, dtype=torch.long)
        for row, completion in enumerate(completions):
            ids[row, : len(completion)] = torch.tensor(completion)
            mask[row, : len(completion)] = 1
        for start in range(0, rows, 8):
            part = slice(start, start + 8)
            width = int(mask[part].sum(1).max())
            inputs = {
                "prompt_ids": torch.tensor(prompts[part]),
                "prompt_mask": torch.ones(8, PROMPT, dtype=torch.long),
                "completion_ids": ids[part, :width],
                "completion_mask": mask[part, :width],
                "advantages": torch.tensor(advantages[part]),
                "num_items_in_batch": mask.sum(),
            }
            trainer.compute_loss(model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        return norm, int(mask.sum())

    return update


def measure(kind, folder, rows, longest):
    """{"seconds", "mib", "norm", "tokens"} of the first and second update, in this process."""
    update = {"ours": ours, "trl": trl}[kind](folder, rows, longest)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize() / 1024  # what is resident now, and not at most
    norm, tokens = update()
    start = time.perf_counter()
    update()
    seconds = time.perf_counter() - start
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "mib": mib, "norm": norm, "tokens": tokens}


def main():
    given = sys.argv[1:] + [ROOT / "tiny/model", 128, 64][len(sys.argv) - 1 :]
    best = {}
    for _ in range(3):
        for kind in ("trl", "ours"):
            command = [sys.executable, __file__, kind, *map(str, given)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
            done = json.loads(done.strip().splitlines()[-1])
            if kind not in best or done["seconds"] < best[kind]["seconds"]:
                best[kind] = done
    print(f"{given[0]}, {given[1]} rows of up to {PROMPT} + {given[2]} tokens, float32")
    for kind, name in (("trl", "TRL 1.16"), ("ours", "grpo.py")):
        row = best[kind]
        print(
            f"{name:10} {row['seconds']:8.2f} s {row['mib']:8.0f} MiB  "
            f"{row['tokens']} tokens trained  |g| {row['norm']:.5g}"
        )
    seconds, mib = (best["ours"][key] / best["trl"][key] for key in ("seconds", "mib"))
    print(f"{'ratio':10} {seconds:8.2f}   {mib:8.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] in (["ours"], ["trl"]):
        print(json.dumps(measure(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main()
