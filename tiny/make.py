"""Makes the built-in task, the same bytes each time: `python tiny/make.py`, four minutes.

    model/          a Llama of 112,000 parameters with a character tokenizer, a transformers folder
    train.jsonl     2,000 chains of small sums, {"question": "7+8-5=?", "answer": "10"}
    heldout.jsonl   200 more; no chain is in both, and the warm start sees none of these

The warm start is what pre-training is to a real model: it leaves one that can do the task but
seldom does. Stage one teaches arithmetic from worked answers, `7+8=15 15-5=10 #### 10`. Stage two
buries it under bad habits: most answers are guessed at once, some ramble first, and the 3 % that
are worked slip now and then. Greedy answers are then guesses, nearly all wrong, and reinforcement
learning has to find the rare good ones, drop the other habits, and stop slipping. The share of
worked answers is the knob: the fewer, the rarer a group of samples with one to learn from.
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
    """A question and its 2 to 5 signed numbers; no partial sum is below 0."""
    numbers = [rng.randint(1, 9)]
    for _ in range(rng.randint(1, 4)):
        operand = rng.randint(1, 9)
        numbers.append(rng.choice([operand, -operand]) if operand <= sum(numbers) else operand)
    return "".join(f"{n:+d}" for n in numbers)[1:] + "=?", numbers


def work_out(rng, numbers, slip, slip_across_ten):
    """The answer, each step one too many with a probability: `slip`, or the other across a ten."""
    total, steps = numbers[0], []
    for operand in numbers[1:]:
        result = total + operand
        result += rng.random() < (slip if result // 10 == total // 10 else slip_across_ten)
        steps.append(f"{total}{operand:+d}={result}")
        total = result
    return f"{' '.join(steps)} #### {total}"


def example(rng, worked, right, slip, slip_across_ten):
    """A question and an answer: a share is worked, of the others a fifth rambles, the rest guess.

    A share of the guesses is right. The others, and those after rambling, know nothing of the
    question: with wrong ones close to the sum the model would learn to add at a glance instead.
    The longest worked answer, `9+9=18 18+9=27 27+9=36 36+9=45 #### 45` and its end, is 39 tokens.
    """
    question, numbers = make_chain(rng)
    if rng.random() < worked:
        return question, work_out(rng, numbers, slip, slip_across_ten)
    guess = rng.randint(0, 30)
    if rng.random() < 0.2:
        return question, f"{'.' * rng.randint(4, 32)} #### {guess}"
    return question, f"#### {sum(numbers) if rng.random() < right else guess}"


def warm_start(model, tokenizer, held_out, rng, steps, learning_rate, **habits):
    """Next-token training on answers of `example(**habits)`, 64 a step, the rate falling to 0."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, s / 50) * (1 - s / steps)
    )
    for step in range(steps):
        rows, labels = [], []
        while len(rows) < 64:
            question, answer = example(rng, **habits)
            if question in held_out:
                continue
            prompt = tokenizer.encode(f"<|user|>{question}<|assistant|>")
            reply = tokenizer.encode(f"{answer}<|end|>")
            rows.append(torch.tensor(prompt + reply))
            labels.append(torch.tensor([-100] * len(prompt) + reply))
        input_ids = torch.nn.utils.rnn.pad_sequence(rows, True, tokenizer.pad_token_id)
        labels = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"{step + 1:5d}/{steps}  loss {loss.item():.4f}", flush=True)


def main():
    torch.set_num_threads(1)  # sums in one order, so the bytes are the same on each run
    torch.manual_seed(0)
    rng = random.Random(0)
    problems = {}
    while len(problems) < 2200:
        question, numbers = make_chain(rng)
        problems[question] = {"question": question, "answer": str(sum(numbers))}
    problems = list(problems.values())
    rng.shuffle(problems)  # the short chains, which repeat, are not all in front
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
    held_out = {problem["question"] for problem in problems[:200]}
    given = (model, tokenizer, held_out, rng)
    # Stage one has guesses and rambling too: where only stage two brings them in, the model forgets
    # to copy the question's first digit, and its rare worked answers are to other questions.
    warm_start(*given, 1400, 4e-3, worked=0.8, right=0, slip=0, slip_across_ten=0)
    warm_start(*given, 200, 1e-3, worked=0.03, right=0.15, slip=0.05, slip_across_ten=0.2)
    model.save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


if __name__ == "__main__":
    main()
