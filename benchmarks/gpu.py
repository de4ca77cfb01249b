"""What only a GPU can show, checked by one command in ten minutes. It downloads nothing.

    python benchmarks/gpu.py            # on a machine with an NVIDIA GPU, with vLLM or without
    python benchmarks/gpu.py --tiny     # the same at small sizes, on a CPU

Each check prints what was expected and what was found; one that fails does not stop the others.
A table of all ends the output, and the exit status is 1 if any failed.
"""

import copy
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import logprobs
import memory
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import common
import grpo

BEGAN, LIMIT = time.perf_counter(), 560  # seconds; what has not begun by then is not run
SCRIPTS = ["reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"]
ON_GPU, CPU = torch.cuda.is_available(), torch.device("cpu")
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # FLOP/s in bfloat16, data sheets'
CARD = torch.cuda.get_device_name() if ON_GPU else "CPU"
SIZE = {"model": memory.shape(memory.Qwen2Config, 512, 2048, 8, 8, 2, 32_768), "rows": (4, 256)}
SIZE |= {"head": (4096, 151_936, 896), "head_time": 1.3, "update_rows": (8, 1024)}
SIZE |= {"updates": ["Qwen3-0.6B", "Qwen3-1.7B", "Qwen2.5-7B"]}
SIZE |= {"engine": memory.MODELS["Qwen3-0.6B"], "samples": (128, 512)}
SIZE |= {"vllm_scripts": SCRIPTS, "flags": ["--dtype", "bfloat16", "--steps", 15]}
TINY = {"model": memory.shape(memory.Qwen2Config, 64, 192, 2, 2, 1, 512), "rows": (4, 64)}
TINY |= {"head": (2048, 8192, 64), "head_time": float("inf"), "update_rows": (2, 128)}
TINY |= {"updates": ["tiny"], "engine": None, "samples": (8, 16), "vllm_scripts": []}
TINY |= {"flags": [*SIZE["flags"][:3], 1, "--prompts-per-step", 4, "--eval-split", "train[:4]"]}


# ------------------------------------------- Helpers -------------------------------------------
class Memory:
    """The bytes that tensors have on the GPU: now, and at most since `peak` was last set."""

    live = property(lambda self: torch.cuda.memory_allocated())
    peak = property(lambda self: torch.cuda.max_memory_allocated())
    peak = peak.setter(lambda self, _: torch.cuda.reset_peak_memory_stats())


def counter():
    gc.collect()  # on the CPU the storages of tensors are counted
    return nullcontext(Memory()) if ON_GPU else memory.Storages()


def clock():
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def make_model(config, device=CPU):
    """A model with random float32 weights; on the CPU they are the same in each call."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config)


def gradient(size, device, dtype, checkpointing=False):
    """The gradient of log-probs with random signs, one vector in float64 on the CPU."""
    model = grpo.shard(make_model(size["model"]), device, dtype, checkpointing)
    batch = memory.make_batch(*size["rows"])
    ids, mask = batch["input_ids"].to(device), batch["mask"].to(device)
    values, _ = common.token_logprobs(model, ids, mask)
    (torch.randn(len(ids), 1).to(device) * values).mean().backward()
    return torch.cat([grpo.whole(p.grad).double().cpu().flatten() for p in model.parameters()])


def below(what, found, most):
    return what, f"below {most:g}", f"{found:.2g}", found < most


def wait(process):
    """The exit status of a process; it is ended when the time is over."""
    try:
        return process.wait(timeout=max(1, LIMIT + 30 - (time.perf_counter() - BEGAN)))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


# ---------------------------- Checks: (what, expected, found, ok) each ----------------------------
def gradients(size, device):
    def off(found, expected):
        return ((found - expected).norm() / expected.norm()).item()

    exact = gradient(size, device, torch.float32)
    half = off(gradient(size, device, torch.bfloat16), exact)
    yield "bfloat16 gradient against float32", "0.002 to 0.04", f"{half:.2g}", 2e-3 < half < 4e-2
    again = gradient(size, device, torch.float32, checkpointing=True)
    yield below("gradient with checkpointing against without", off(again, exact), 1e-5)
    if ON_GPU:
        cpu = gradient(size, CPU, torch.float32)
        yield below("float32 gradient on the GPU against the CPU", off(exact, cpu), 1e-5)


def optimizers(size, device):
    model = grpo.shard(make_model(size["model"]), device, torch.float32)
    other, optimizer = copy.deepcopy(model), grpo.make_optimizer(model)
    settings = {"betas": optimizer.defaults["betas"], "weight_decay": 0.0, "foreach": False}
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3, **settings)
    optimizer.param_groups[0].update(lr=1e-3, fused=True)
    for _ in range(3):
        for weight, twin in zip(model.parameters(), other.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            twin.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    most = max((a - b).abs().max().item() for a, b in pairs)
    yield below("fused AdamW against plain, three steps of 0.001", most, 1e-6)


def sharding(size, device):
    model = make_model(size["model"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    after = grpo.shard(model, device, torch.bfloat16).state_dict()
    same = all(torch.equal(grpo.whole(after[n]).cpu(), weight) for n, weight in before.items())
    yield "weights after FSDP2 in one process", "the same bits", f"same: {same}", same
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones)
    yield (
        f"sum by {'NCCL' if ON_GPU else 'gloo'}",
        "4",
        f"{ones.sum().item():g}",
        ones.sum().item() == 4,
    )


def head(size, device):
    found = {}
    for name, function in (("naive", logprobs.naive), ("ours", common.token_logprobs)):
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        model, ids, mask = logprobs.make(*size["head"], device, dtype)
        for _ in range(2):  # the first loads kernels
            with counter() as counted:
                before, counted.peak, start = counted.live, counted.live, clock()
                values, entropies = function(model, ids, mask)
                (values.sum() + 0.01 * entropies.sum()).backward()
                found[name] = counted.peak - before, clock() - start
            model.zero_grad()
            del values, entropies
    space, seconds = (a / b for a, b in zip(found["ours"], found["naive"], strict=True))
    what = "log-probs and entropies of {} x {} x {} against naive".format(*size["head"])
    yield f"memory: {what}", "0.2 times at most", f"{space:.2f} times", space <= 0.2
    most = size["head_time"]
    yield f"time: {what}", f"{most:g} times at most", f"{seconds:.2f} times", seconds <= most


def updates(size, device):
    """Peak memory of an update against the simulation, and its share of the GPU's arithmetic."""
    rows, length = size["update_rows"]
    total = torch.cuda.mem_get_info()[1] if ON_GPU else 2**40
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a simulation needs none
    for name in size["updates"]:
        for checkpointing in (False, True):  # with it where it takes it
            call = f"memory.MODELS['{name}'], 1, {checkpointing}, {rows}, {length}"
            command = [sys.executable, "-c", f"import memory; print(memory.simulate({call})[1])"]
            done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, check=True, env=env)
            expected = int(done.stdout.split()[-1])
            if expected < 0.95 * total:
                break
        what = f"update of {name}{', checkpointing' * checkpointing}"
        words = f"{expected / 2**20:,.1f} MiB (-7 to +5 %)"
        if expected > 0.95 * total:
            yield what, words, "not run: too large for this GPU", True
            continue
        with counter() as counted:
            model, kind = make_model(memory.MODELS[name], device), torch.bfloat16
            _, peak = memory.learn(model, device, kind, checkpointing, rows, length, counted)
        yield what, words, f"{peak / 2**20:,.1f} MiB", 0.93 < peak / expected < 1.05
        optimizer, batch = grpo.make_optimizer(model), memory.make_batch(4 * rows, length)
        start = clock()
        grpo.update(model, optimizer, batch, grpo.Args(minibatches=1, micro_batch_size=rows))
        speed = 6 * model.num_parameters() * 4 * rows * length / (clock() - start)
        most = [flops for kind, flops in PEAKS.items() if kind in CARD]
        share = f", {speed / most[0]:.0%} of the GPU's" if most else ""
        yield f"speed: {what}", "measured", f"{speed / 1e12:.3g} TFLOP/s{share}", True
        del model, optimizer


def scripts(size, names, engine):
    """The scripts on the built-in task, with the small engine all at once."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name in names:
            command = [sys.executable, HERE.parent / f"{name}.py", *size["flags"]]
            command += ["--output-dir", Path(folder, name), "--rollout-engine", engine]
            with open(f"{folder}/{name}.log", "w", encoding="utf-8") as log:
                running[name] = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
            if engine == "vllm":
                wait(running[name])
        for name, process in running.items():
            what = f"{name}.py, {engine} in bfloat16"
            if status := wait(process):
                last = Path(folder, f"{name}.log").read_text(encoding="utf-8").strip()[-200:]
                yield what, "runs", f"exit status {status}: {last}", False
                continue
            with open(f"{folder}/{name}/metrics.jsonl", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
            off = max(row["engine/mismatch"] for row in rows)
            found = f"{accuracy[0]:.2f} to {accuracy[-1]:.2f}, off by {off:.3f} nats"
            words = "off by < 0.05 nats" + ", accuracy 0.1 higher" * (size is SIZE)
            ok = off < 0.05 and (size is TINY or accuracy[-1] > accuracy[0] + 0.1)
            yield what, words, found, ok


def vllm_engine(size, device):
    """Two steps by hand with vLLM: sleep and wake, weights handed over, shares of the time."""
    count, longest = size["samples"]
    source = str(HERE.parent / "tiny/model")
    if size["engine"]:
        tokenizer, source = common.load_tokenizer(source), tempfile.mkdtemp()
        make_model(size["engine"]).save_pretrained(source)
        tokenizer.save_pretrained(source)
    args = grpo.Args(model=source, max_completion_tokens=longest, minibatches=1)
    model = grpo.load_model(AutoModelForCausalLM, source, torch.float32)
    model = grpo.shard(model, device, torch.bfloat16)
    optimizer = grpo.make_optimizer(model)
    optimizer.param_groups[0]["lr"] = 1e-4
    engine = grpo.VLLMEngine(args, {1}, longest + 32, torch.bfloat16)
    prompts = [[10 + (i + k) % 50 for k in range(16)] for i in range(count)]
    for step in range(2):
        times = [clock()]
        weights = model.state_dict().items()
        engine.sync((name, grpo.whole(weight.to(torch.bfloat16))) for name, weight in weights)
        times.append(clock())
        completions, kept = zip(*engine.generate(prompts, range(count), 1.0), strict=True)
        times.append(clock())
        free = torch.cuda.mem_get_info()[0] if ON_GPU else 0
        engine.sleep()
        if ON_GPU:
            freed = (torch.cuda.mem_get_info()[0] - free) / torch.cuda.mem_get_info()[1]
            least = 0.8 * args.gpu_memory_utilization
            what = f"step {step}: share of the memory that vLLM's sleep frees"
            yield what, f"over {least:.2f}", f"{freed:.2f}", freed > least
        input_ids, mask = common.collate(prompts, completions, 0)
        flat = torch.tensor([value for values in kept for value in values])
        batch = {"input_ids": input_ids, "mask": mask}
        batch["engine_logprobs"] = torch.zeros(mask.shape).masked_scatter(mask, flat)
        batch["advantages"] = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)[:, None]
        start = clock()
        batch["old_logprobs"], _ = grpo.score_tokens(model, batch, args)
        grpo.update(model, optimizer, batch, args)
        times.append(times[-1] + clock() - start)
        off = (batch["old_logprobs"] - batch["engine_logprobs"]).abs()[mask].mean().item()
        yield below(f"step {step}: trainer against vLLM, nats a token", off, 0.03)
    parts = [times[i + 1] - times[i] for i in range(3)]
    found = "hand-over {:.0%}, generation {:.0%}, update {:.0%}"
    yield "shares of a step", "measured", found.format(*(part / sum(parts) for part in parts)), True
    yield "vLLM", "measured", f"{mask.sum().item() / parts[1]:,.0f} tokens a second", True


def vllm_process(flags):
    """vllm_engine in a process of its own, which gives the GPU back whatever happens there."""
    command = [sys.executable, __file__, "--only-vllm", *flags]
    left = max(1, LIMIT - (time.perf_counter() - BEGAN))
    done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    rows = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    if not rows:
        raise RuntimeError(done.stderr[-300:])
    yield from json.loads(rows[-1])


# ------------------------------------------- The run -------------------------------------------
def run(name, check, *inputs):
    """The rows of a check, shown as they come; what it raises is a row that failed."""
    rows = []
    try:
        if time.perf_counter() - BEGAN > LIMIT:
            raise TimeoutError("not run: the time is over")
        for row in check(*inputs):
            rows.append(row)
            show(row)
    except (Exception, SystemExit) as error:
        rows.append((name, "no error", f"{type(error).__name__}: {error}"[:300], False))
        show(rows[-1])
    return rows


def show(row):
    words = [" ".join(word.split()) for word in [*row[:3], "ok" if row[3] else "FAILED"]]
    print(f"| {' | '.join(words)} |", flush=True)


def main():
    flags = [flag for flag in ("--tiny", "--only-vllm") if flag in sys.argv]
    if len(flags) < len(sys.argv) - 1 or not (ON_GPU or "--tiny" in flags):
        sys.exit(f"usage: python {sys.argv[0]}, on a machine with a GPU, or with --tiny")
    size = TINY if "--tiny" in flags else SIZE
    device, _ = grpo.start_processes(grpo.Args())
    if "--only-vllm" in flags:
        print(json.dumps(run("vLLM", vllm_engine, size, device)), flush=True)
        os._exit(0)
    rows = []
    for check in (gradients, optimizers, sharding, head, updates):
        rows += run(check.__name__, check, size, device)
    rows += run("scripts", scripts, size, SCRIPTS, "transformers")
    if importlib.util.find_spec("vllm"):
        rows += run("vLLM", vllm_process, flags)
        rows += run("scripts with vLLM", scripts, size, size["vllm_scripts"], "vllm")
    print(f"\n{CARD}, torch {torch.__version__}, {time.perf_counter() - BEGAN:.0f} seconds\n")
    print("| check | expected | found | |\n|---|---|---|---|")
    for row in rows:
        show(row)
    print(f"\n{len(rows)} checks, {sum(not row[3] for row in rows)} failed", flush=True)
    os._exit(not all(row[3] for row in rows))  # past gloo's threads, which abort at times


if __name__ == "__main__":
    main()
