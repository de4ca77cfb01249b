"""vLLM samples from the trainer's weights, whatever the model family, at every hand-over.

An engine fills a process, and vLLM's imports take longer than the work. So this file, run as a
program, imports once and forks a process for each job, two at a time; the tests read what they say.
"""

import gc
import inspect
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLOSE = 1e-4  # nats; measured: at most 4e-6 between vLLM and the trainer, both in float32
END, NINE, GROUP = 5, 15, 8  # ids of <|end|> and of 9, the stop tokens here; completions a prompt
SMALL = {"vocab_size": 86, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 512}
SMALL |= {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": None}
GQA = {"num_key_value_heads": 1}  # fewer keys than queries
WINDOW = {"query_pre_attn_scalar": 32, "sliding_window": 64}
SCALES = {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
MOE = GQA | {"num_experts_per_tok": 2, "initializer_range": 0.3}
FAMILIES = {"llama": GQA, "qwen2": GQA, "qwen3": GQA, "phi3": GQA}
FAMILIES |= {"mistral": GQA | {"sliding_window": None}, "granite": GQA | SCALES}
FAMILIES |= {"gemma2": GQA | WINDOW, "gemma3_text": GQA | WINDOW}
FAMILIES |= {"gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512}}
FAMILIES |= {"olmo2": GQA, "smollm3": GQA, "gpt_neox": {}}  # vLLM runs transformers' code of these
FAMILIES |= {"mixtral": MOE, "qwen3_moe": MOE | {"num_experts": 8, "moe_intermediate_size": 32}}
REFUSED = {"mixtral": "does not take this model's weights", "qwen3_moe": "--mismatch-limit"}
CASES = [(name, tied) for name in FAMILIES.keys() - REFUSED.keys() for tied in (False, True)]
CASES = sorted(set(CASES) - {("gemma2", False)})  # which vLLM has with a tied head alone


def make_model(folder, name, tied):
    options = {**SMALL, **FAMILIES[name], "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    grpo.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    common.load_tokenizer(ROOT / "tiny/model").save_pretrained(folder)


def start(folder, stop_ids):
    """(trainer, engine) of a folder, made in the scripts' order."""
    args = grpo.Args(model=str(folder), max_completion_tokens=24)
    grpo.dist.init_process_group("gloo", store=grpo.dist.HashStore(), rank=0, world_size=1)
    model = grpo.load_model(grpo.AutoModelForCausalLM, args.model, torch.float32)
    return model, grpo.VLLMEngine(args, stop_ids, 340, torch.float32)


def disagreement(model, prompts, sampled, temperature):
    """Largest |log p_trainer - log p_engine| of samples, in nats."""
    input_ids, mask = common.collate(prompts, [ids for ids, _ in sampled], 0)
    with torch.no_grad():
        ours, _ = common.token_logprobs(model, input_ids, mask, temperature)
    theirs = torch.tensor([value for _, logprobs in sampled for value in logprobs])
    return (ours[mask] - theirs).abs().max().item()


def hand_over(folder, name, tied):
    """The disagreement before and after each of two hand-overs of weights that all changed."""
    make_model(folder / "model", name, tied)
    model, engine = start(folder / "model", {END})
    noise = torch.Generator().manual_seed(1)
    # On the CPU a block of the prefix cache holds 128 tokens: a shorter prompt is never in it.
    prompts = [torch.randint(16, 80, (n,), generator=noise).tolist() for n in (5, 290, 20, 7)]
    found = []
    engine.sync(iter(model.state_dict().items()))
    for _ in range(2):
        for weight in model.parameters():
            weight.data += 0.1 * torch.randn(weight.shape, generator=noise)
        for _ in ("old weights", "new weights"):
            sampled = engine.generate(prompts, [3, 4, 5, 6], 0.7)
            found.append(disagreement(model, prompts, sampled, 0.7))
            engine.sleep()
            engine.sync(iter(model.state_dict().items()))
    return found


def command(folder, flags, family=None):
    """What grpo.py does with these flags: its first samples and its rows, or how it ended."""
    data, saved = folder.parent, folder / "run/metrics.jsonl"
    if family:
        make_model(folder / "model", family, tied=False)
    words = f"--model {ROOT}/tiny/model --prompt-field question --answer-field answer"
    words += f" --dataset {data}/train.jsonl --eval-dataset {data}/eval.jsonl --eval-split train"
    words += f" --rollout-engine vllm --group-size {GROUP} --max-completion-tokens 40 --steps 1"
    words += " --micro-batch-size 64 --learning-rate 2e-4 --warmup-steps 3 --eval-every 100"
    words = "" if "--resume" in flags else f"{words} --output-dir {folder}/run"
    sys.argv = f"grpo.py {words} {flags.format(folder=folder)}".split()
    first, rollout = [], grpo.rollout

    def record(engine, tokenizer, rows, temperature):
        sampled = rollout(engine, tokenizer, rows, temperature)
        if temperature and not first:
            pairs = zip(rows, sampled, strict=True)
            first.extend([p["prompt"], seed, done[0], done[3]] for (p, seed), done in pairs)
        return sampled

    grpo.rollout, grpo.HERE = record, folder  # where no plot.py is
    try:
        grpo.main(grpo.parse_args())
    except SystemExit as error:
        return {"ended": str(error), "steps": saved.exists()}
    rows = [json.loads(line) for line in saved.read_text(encoding="utf-8").splitlines()]
    return {"first": first, "rows": rows}


def rank(folder, number, port):
    """One of two processes, with the environment that torchrun gives it."""
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return command(folder, "--prompts-per-step 16")


def samples(folder):
    """What one engine of the built-in model says; the checkpoint's settings would spoil it all."""
    shutil.copytree(ROOT / "tiny/model", folder / "model")
    settings = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "temperature": 0.1}
    path = folder / "model/generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    model, engine = start(folder / "model", {END, NINE})
    engine.sync(iter(model.state_dict().items()))
    tokenizer = common.load_tokenizer(folder / "model")
    texts = [f"{a}+{b}=?" for a in (1, 4, 7) for b in (2, 5, 8)] * 16
    prompts = [common.encode_prompt(tokenizer, text) for text in texts]  # nine, each 16 times
    seeds = [1000 * (i % 9) + i // 9 for i in range(len(texts))]
    found = {"batch": engine.generate(prompts, seeds, 1.0)}
    found["alone"] = [engine.generate(prompts[i : i + 1], seeds[i : i + 1], 1.0)[0] for i in (4, 9)]
    cold = engine.generate(prompts, seeds, 0.7)
    found["at 0.7"] = [disagreement(model, prompts, cold, heat) for heat in (0.7, 1.0)]
    # vLLM starts at most some 4,096 tokens of prompts at once; a seeded prompt cut there fails.
    long = [(prompt * 300)[:290] for prompt in prompts[:18]]
    found["long"] = len(engine.generate(long, seeds[:18], 1.0))
    return found


def cuda(folder):
    """The engine's calls where a GPU is, made to a stand-in with the signatures of vLLM's own."""
    os.environ["RANK"] = "0"
    stand_in = mock.create_autospec(vllm.LLM)  # raises where a call does not fit a signature
    vllm.LLM, torch.cuda.is_available = stand_in, lambda: True
    grpo.VLLMEngine(grpo.Args(model="m"), {END}, 99, torch.bfloat16).sync(iter([]))
    options = stand_in.call_args.kwargs
    known = EngineArgs.__dataclass_fields__.keys() | inspect.signature(stand_in).parameters.keys()
    assert options.keys() <= known, options
    assert options["logprobs_mode"] == "processed_logprobs" in get_args(LogprobsMode)
    backends = get_args(DistributedExecutorBackend)
    assert options["distributed_executor_backend"] == "external_launcher" in backends
    assert options["enable_sleep_mode"] and options["gpu_memory_utilization"] > 0
    assert "weights_iterator" in inspect.signature(GPUModelRunner.reload_weights).parameters
    assert "flat_logprobs" in inspect.signature(vllm.SamplingParams).parameters
    assert all(f'tag="{tag}"' in inspect.getsource(gpu_worker) for tag in ("weights", "kv_cache"))
    reload = mock.call.collective_rpc("reload_weights", kwargs={"weights_iterator": mock.ANY})
    calls = [mock.call.sleep(level=2), mock.call.wake_up(["weights"]), reload]
    calls += [mock.call.wake_up(["kv_cache"])]
    assert [call for call in stand_in.return_value.mock_calls if call in calls] == calls


JOBS = {"train": (command, "--prompts-per-step 16 --steps 12"), "samples": (samples,)}
JOBS |= {"few": (command, "--prompts-per-step 4"), "cuda": (cuda,)}
JOBS |= {f"{name} {tied}": (hand_over, name, tied) for name, tied in CASES}
JOBS |= {name: (command, "--model {folder}/model", name) for name in REFUSED}


def work(job):
    """[name, what the job returns, or the error it ends with]."""
    name, folder, (function, *inputs) = job
    try:
        folder.mkdir(exist_ok=True)
        with redirect_stdout(sys.stderr):
            return [name, function(folder, *inputs)]
    except BaseException:
        return [name, traceback.format_exc()]


def serve(folder):
    gc.collect()
    gc.freeze()
    # vLLM looks at each family's class in a process of its own, ten seconds each.
    vllm.model_executor.models.registry._run_in_subprocess = lambda look: look()
    for split, count in (("train", 400), ("eval", 24)):
        sums = [random.Random(i).sample(range(1, 10), 2) for i in range(count)]
        rows = [{"question": f"{a}+{b}=?", "answer": str(a + b)} for a, b in sums]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    jobs = [(f"rank {i}", folder / "ranks", (rank, i, port)) for i in "01"]  # these two at once
    jobs += [(name, folder / name, job) for name, job in JOBS.items()]
    last = [("resume", folder / "train", (command, "--resume {folder}/run --steps 14"))]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for part in (jobs, last):
            print(*map(json.dumps, pool.imap_unordered(work, part)), sep="\n", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import torch
    import transformers

    import common
    import grpo  # first: it sets vLLM's environment

    import vllm.model_executor.models.transformers  # isort: skip
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker
    from vllm.config.model import LogprobsMode
    from vllm.config.parallel import DistributedExecutorBackend
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    serve(Path(sys.argv[1]))
    sys.exit()

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """result(name): what that job returned."""
    words = [sys.executable, __file__, str(tmp_path_factory.mktemp("vllm"))]
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(words, capture_output=True, text=True, env=os.environ | env, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = dict(json.loads(line) for line in ran.stdout.splitlines() if line.startswith('["'))

    def get(name):
        if isinstance(found[name], str):
            pytest.fail(found[name], pytrace=False)
        return found[name]

    return get


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_logprobs_are_the_trainers_after_every_hand_over(result, name, tied):
    found = result(f"{name} {tied}")
    assert max(found[1::2]) < CLOSE
    assert min(found[::2]) > 0.1  # measured: 0.8 to 8, so old weights would be seen


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_gets_wrong_is_refused_in_one_line_before_the_first_step(result, name):
    found = result(name)
    assert found["ended"].startswith("error: ") and REFUSED[name] in found["ended"]
    assert "\n" not in found["ended"] and not found["steps"]


def test_logprobs_are_of_the_temperature_and_samples_of_the_seed_alone(result):
    found = result("samples")
    assert found["at 0.7"][0] < CLOSE and found["at 0.7"][1] > 0.1  # the second is scored at 1
    for i, (ids, logprobs) in zip((4, 9), found["alone"], strict=True):
        assert ids == found["batch"][i][0]
        assert logprobs == pytest.approx(found["batch"][i][1], abs=CLOSE)
    assert found["long"] == 18


def test_only_a_stop_token_ends_a_completion_and_nothing_truncates_the_distribution(result):
    batch = result("samples")["batch"]
    # Of the checkpoint's own settings, top_k 1 leaves one completion, with log-probs of 0.
    assert min(min(logprobs) for _, logprobs in batch) < -3.0
    assert all(len({tuple(ids) for ids, _ in batch[prompt::9]}) > 2 for prompt in range(9))
    assert all(len(ids) == len(logprobs) <= 24 for ids, logprobs in batch)
    assert {ids[-1] for ids, _ in batch if len(ids) < 24} == {END, NINE}
    assert not {END, NINE} & {token for ids, _ in batch for token in ids[:-1]}


def test_a_run_learns_and_goes_on(result):
    rows, resumed = result("train")["rows"], result("resume")["rows"]
    assert [row["step"] for row in resumed] == list(range(15)) and resumed[:12] == rows[:12]
    assert max(row["engine/mismatch"] for row in resumed) < CLOSE
    first, last = (sum(r["reward/mean"] for r in part) / 3 for part in (resumed[:3], resumed[-3:]))
    assert last > first + 0.2


def test_samples_depend_on_the_place_of_their_prompt_alone(result):
    # However many processes and prompts: row p * G + k is sampled with the seed of p, plus k.
    one, few = result("train")["first"], result("few")["first"]
    assert len(one) == 16 * GROUP and few == one[: 4 * GROUP]
    assert result("rank 0")["first"] == result("rank 1")["first"] == one
    seeds = [seed for _, seed, _, _ in one]
    assert seeds == [seeds[i - i % GROUP] + i % GROUP for i in range(len(one))]
    assert max(row["engine/mismatch"] for row in result("rank 0")["rows"]) < CLOSE


def test_what_only_a_gpu_reaches_has_these_names_in_vllm(result):
    result("cuda")  # which compares
