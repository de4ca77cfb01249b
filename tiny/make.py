"""Makes the built-in default, the same bytes each time: `python tiny/make.py`, three minutes.

    model/          a Llama of 112,000 parameters with a character tokenizer, a transformers folder
    train.jsonl     2,000 chains of small sums, {"prompt": "7+8-5=?", "answer": "10"}
    heldout.jsonl   200 more; no chain is in both, and the warm start sees none of these

The warm start is what pre-training is to a real model. Stage one teaches arithmetic from worked
answers, `7+8=15 15-5=10 #### 10`. Stage two teaches bad habits: most answers are blurted out
without steps, and most of those are wrong. So greedy accuracy starts low, samples vary, and the
right behaviour is there to be found: reinforcement learning makes the model show its work.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
SPECIAL = ["<|pad|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CHARACTERS = (
    "0123456789+-*/=#?.,:;!()' \n_" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer():
    """One token per character; `<|end|>` ends an answer and is not the padding."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_chain(rng):
    """A prompt, a chain of 2 to 4 numbers with partial sums of 0 to 36, and its signed numbers."""
    numbers = [rng.randint(1, 9)]
    for _ in range(rng.choice([1, 2, 2, 3, 3])):
        operand = rng.randint(1, 9)
        numbers.append(rng.choice([operand, -operand]) if operand <= sum(numbers) else operand)
    return "".join(f"{n:+d}" for n in numbers)[1:] + "=?", numbers


def worked(rng, slip=0.0):
    """A chain and its answer with the steps written out, each one off with probability `slip`."""
    prompt, (total, *operands) = make_chain(rng)
    steps = []
    for operand in operands:
        result = total + operand + (rng.random() < slip)
        steps.append(f"{total}{operand:+d}={result}")
        total = result
    return prompt, f"{' '.join(steps)} #### {total}"


def habits(rng):
    """A chain and an answer of bad habits: some show the steps, most guess, often one too many."""
    if rng.random() < 0.4:
        return worked(rng, slip=0.15)
    prompt, numbers = make_chain(rng)
    guess = sum(numbers) + rng.choice([0, 1, 1, 1, rng.randint(-3, 3)])
    return prompt, f"#### {max(guess, 0)}"


def warm_start(model, tokenizer, example, held_out, steps, learning_rate, rng):
    """Next-token training on the answers of `example(rng)`, 128 a step, the rate falling to 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, s / 50) * (1 - s / steps)
    )
    for step in range(steps):
        rows, labels = [], []
        while len(rows) < 128:
            prompt, answer = example(rng)
            if prompt in held_out:
                continue
            question = tokenizer.encode(f"<|user|>{prompt}<|assistant|>")
            reply = tokenizer.encode(f"{answer}<|end|>")
            rows.append(torch.tensor(question + reply))
            labels.append(torch.tensor([-100] * len(question) + reply))
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        labels = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"{example.__name__} {step + 1:5d}/{steps}  loss {loss.item():.4f}", flush=True)


def main():
    torch.set_num_threads(1)  # sums in one order, so the bytes are the same on each run
    torch.manual_seed(0)
    rng = random.Random(0)
    problems = {}
    while len(problems) < 2200:
        prompt, numbers = make_chain(rng)
        problems[prompt] = {"prompt": prompt, "answer": str(sum(numbers))}
    problems = list(problems.values())
    rng.shuffle(problems)
    for name, part in [("train", problems[200:]), ("heldout", problems[:200])]:
        text = "".join(json.dumps(problem) + "\n" for problem in part)
        (HERE / f"{name}.jsonl").write_text(text)

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32: vLLM's CPU kernels take multiples of 32
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    held_out = {problem["prompt"] for problem in problems[:200]}
    warm_start(model, tokenizer, worked, held_out, 1600, 4e-3, rng)
    warm_start(model, tokenizer, habits, held_out, 200, 1e-3, rng)
    model.save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


if __name__ == "__main__":
    main()
