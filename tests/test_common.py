"""common.py: text and tokens, log-probabilities, estimators, data, the engine, disk and flags.

Numbers are worked out by hand or by enumeration next to the test that uses them; where a function
has a naive form (log_softmax over all logits, a forward pass per token), that is the reference.
"""

import itertools
import json
import math
import re
import shutil
import sys
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import datasets
import pytest
import tokenizers
import torch
import transformers
from conftest import TINY, read_jsonl
from tokenizers import models, pre_tokenizers, processors

import common
import grpo

# ---------------------------------------- Tokenizers ----------------------------------------
BOS, EOS, UNK, HI, USER, ASSISTANT = range(6)
WORDS = {"<s>": BOS, "</s>": EOS, "<unk>": UNK, "hi": HI, "user": USER, "assistant": ASSISTANT}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def make_tokenizer(tmp_path):
    """Saves a tokenizer of six words that adds `added` around a text; loads it as scripts do."""

    def make(template=None, added="<s> $A", **special):
        words = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        ids = [("<s>", BOS), ("</s>", EOS)]
        words.post_processor = processors.TemplateProcessing(single=added, special_tokens=ids)
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)
        fast.chat_template = template
        fast.save_pretrained(tmp_path / "tokenizer")
        return common.load_tokenizer(tmp_path / "tokenizer")

    return make


def test_load_tokenizer_pads_with_eos_where_there_is_no_padding_token(make_tokenizer):
    assert make_tokenizer().pad_token_id == EOS
    assert make_tokenizer(pad_token="<unk>").pad_token_id == UNK


def test_load_tokenizer_refuses_what_cannot_end_a_completion(make_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no EOS"):
        make_tokenizer(eos_token=None)
    with pytest.raises((ValueError, OSError)):
        common.load_tokenizer(tmp_path / "nothing here")


def test_template_is_applied_once_to_a_plain_string_with_the_generation_prompt(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE)
    assert tokenizer("hi")["input_ids"] == [BOS, HI]  # the trap: encoding adds a BOS of its own
    expected = [BOS, USER, HI, ASSISTANT]
    assert common.encode_prompt(tokenizer, "hi") == expected
    assert common.encode_prompt(tokenizer, [{"role": "user", "content": "hi"}]) == expected


def test_chat_messages_keep_their_roles_and_order(make_tokenizer):
    messages = [("user", "hi"), ("assistant", "hi"), ("user", "hi")]
    messages = [{"role": role, "content": content} for role, content in messages]
    expected = [BOS, USER, HI, ASSISTANT, HI, USER, HI, ASSISTANT]
    assert common.encode_prompt(make_tokenizer(TEMPLATE), messages) == expected


def test_template_without_bos_gets_none(make_tokenizer):
    tokenizer = make_tokenizer(TEMPLATE.replace("{{ bos_token }}", ""))
    assert common.encode_prompt(tokenizer, "hi") == [USER, HI, ASSISTANT]


@pytest.mark.parametrize(
    "added, expected",
    [("<s> $A", [BOS, HI]), ("<s> $A </s>", [BOS, HI]), ("$A </s>", [HI]), ("$A", [HI])],
)
def test_without_template_a_string_keeps_its_bos_and_loses_an_eos(make_tokenizer, added, expected):
    # An EOS at the prompt's end would have the model go on after the end of a text.
    assert common.encode_prompt(make_tokenizer(added=added), "hi") == expected


def test_at_most_one_bos_where_the_text_has_one_already(make_tokenizer):
    assert common.encode_prompt(make_tokenizer(), "<s> hi") == [BOS, HI]


def test_chat_messages_without_template_raise(make_tokenizer):
    with pytest.raises(ValueError, match="chat template"):
        common.encode_prompt(make_tokenizer(), [{"role": "user", "content": "hi"}])


def test_encode_problems_adds_ids_and_refuses_a_prompt_that_is_too_long(make_tokenizer):
    tokenizer, problems = make_tokenizer(), [{"prompt": "hi hi"}]
    common.encode_problems(problems, tokenizer, 3)
    assert problems[0]["ids"] == [BOS, HI, HI]
    with pytest.raises(SystemExit, match="'hi hi' has 3 tokens; --max-prompt-tokens is 2"):
        common.encode_problems(problems, tokenizer, 2)


# -------------------------------------- Stops and masks --------------------------------------
@pytest.mark.parametrize("listed, expected", [(None, {2}), (7, {2, 7}), ([7, 9], {2, 7, 9})])
def test_stop_ids_are_the_tokenizers_and_the_generation_configs(listed, expected):
    tokenizer = SimpleNamespace(eos_token_id=2)
    config = transformers.GenerationConfig(eos_token_id=listed)
    assert common.stop_token_ids(tokenizer, config) == expected


@pytest.mark.parametrize(
    "ids, stop_ids, kept, ended",
    [
        ([5, 7, 9, 0], {2, 7}, [5, 7], True),
        ([5, 6, 2, 2, 2], {2}, [5, 6, 2], True),
        ([2, 2], {2}, [2], True),
        ([5, 6], {2}, [5, 6], False),
        ([], {2}, [], False),
    ],
)
def test_truncate_at_stop(ids, stop_ids, kept, ended):
    assert common.truncate_at_stop(ids, stop_ids) == (kept, ended)


def test_mask_covers_the_stop_token_though_padding_is_the_same_token():
    # Engines return rows padded with EOS (2) after the first one, which alone is trained on.
    rows = [[5, 6, 2, 2, 2], [2, 2], [5, 6, 5, 6, 5]]
    completions = [common.truncate_at_stop(row, {2})[0] for row in rows]
    input_ids, mask = common.collate([[8], [8], [8]], completions, pad_id=2)
    assert input_ids.tolist() == [[8, 5, 6, 2, 2, 2], [8, 2, 2, 2, 2, 2], [8, 5, 6, 5, 6, 5]]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert mask.dtype == torch.bool


def test_mask_leaves_out_prompts_of_different_lengths():
    input_ids, mask = common.collate([[8, 9, 8], [9]], [[5], [6, 2]], pad_id=0)
    assert input_ids.tolist() == [[8, 9, 8, 5], [9, 6, 2, 0]]
    assert mask.int().tolist() == [[0, 0, 1], [1, 1, 0]]  # column t is about input_ids[:, t + 1]


def test_trained_ids_are_the_engines_and_not_the_decoded_texts():
    bpe = models.BPE({"<pad>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(bpe))
    text = tokenizer.decode([1, 2]).replace(" ", "")
    assert tokenizer(text)["input_ids"] == [3]  # the trap: another encoding of the same text
    batch = common.make_batch([{"ids": [2]}], [[1, 2]], [[-0.5, -0.25]], pad_id=0)
    assert batch["input_ids"].tolist() == [[2, 1, 2]]


def test_engine_logprobs_stand_in_the_columns_of_their_tokens():
    problems, logprobs = [{"ids": [8, 9, 8]}, {"ids": [9]}], [[-1.0], [-2.0, -3.0]]
    batch = common.make_batch(problems, [[5], [6, 2]], logprobs, pad_id=0)
    assert batch["engine_logprobs"].tolist() == [[0, 0, -1], [-2, -3, 0]]


# ---------------------------------- Log-probs and entropies ----------------------------------
class Table(torch.nn.Module):
    """A language model whose logits depend on the last token alone: row i of the table after i."""

    def __init__(self, rows, dtype=torch.float32):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.as_tensor(rows).to(dtype))
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)

    def base_model(self, input_ids, **options):
        one_hot = torch.nn.functional.one_hot(input_ids, len(self.rows)).to(self.rows.dtype)
        return SimpleNamespace(last_hidden_state=one_hot)

    def get_output_embeddings(self):
        return SimpleNamespace(weight=self.rows.T)


def random_model(kind, **options):
    """A random model with weights large enough that scales, caps and positions show."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 23}
    sizes |= {"intermediate_size": 24, "initializer_range": 0.5, "pad_token_id": 0, **options}
    if kind in ("Llama", "Gemma2", "Cohere", "Granite"):
        sizes |= {"num_key_value_heads": 2, "head_dim": 8}
    if kind in ("GPT2", "GPTJ"):  # by their own names
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 23, "n_positions": 32}
        sizes |= {"initializer_range": 0.5, "rotary_dim": 4, **options}
    config = getattr(transformers, f"{kind}Config")(bos_token_id=None, eos_token_id=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:  # is made as zeros, which would hide that it is left out
        torch.nn.init.normal_(bias)
    return model


def naive(model, input_ids, mask, temperature):
    """(log-probs, entropies) from all logits of the model's own forward."""
    logits = model(input_ids=input_ids).logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1)
    taken = logprobs.gather(-1, input_ids[:, 1:, None])[..., 0]
    return taken * mask, torch.distributions.Categorical(logits=logits).entropy() * mask


def gradients(model, outputs, weights):
    """Gradients of a weighted sum of log-probs and entropies in every parameter of the model."""
    model.zero_grad()
    sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
def test_equals_log_softmax_and_gather_in_value_and_gradient(tiny_model, chunk_size, temperature):
    torch.manual_seed(0)
    prompts = [[2, 10, 11, 3], [2, 12, 3]]
    input_ids, mask = common.collate(prompts, [[10, 11, 5], [12, 13, 14, 15, 5]], pad_id=5)
    weights = torch.randn(2, *mask.shape)
    expected = naive(tiny_model, input_ids, mask, temperature)
    expected_gradients = gradients(tiny_model, expected, weights)

    outputs = common.token_logprobs(tiny_model, input_ids, mask, temperature, chunk_size)
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32 and output.shape == mask.shape
        torch.testing.assert_close(output, value, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(tiny_model, outputs, weights).items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-4, rtol=1e-4)


def test_scores_are_not_shifted_by_one():
    # P(2) = .9 after 0 and P(1) = .8 after 2; any other alignment reads another number.
    model = Table([[0.04, 0.06, 0.9], [0.2, 0.3, 0.5], [0.15, 0.8, 0.05]])
    model.rows.data.log_()
    logprobs, _ = common.token_logprobs(model, torch.tensor([[0, 2, 1]]), torch.ones(1, 2).bool())
    torch.testing.assert_close(logprobs[0], torch.tensor([0.9, 0.8]).log())


def test_temperature_divides_the_logits():
    # softmax([2, 1, 0] / .5) = softmax([4, 2, 0]): 4 - log(e^4 + e^2 + 1) = -.1429
    model, mask = Table([[2.0, 1.0, 0.0]] * 3), torch.tensor([[True]])
    logprobs = [
        common.token_logprobs(model, torch.tensor([[0, token]]), mask, 0.5)[0].item()
        for token in range(3)
    ]
    assert logprobs == pytest.approx([-0.1429, -2.1429, -4.1429], abs=1e-4)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_raises(temperature):
    with pytest.raises(ValueError, match="temperature"):
        model, ids = Table([[0.0, 0.0]] * 2), torch.tensor([[0, 1]])
        common.token_logprobs(model, ids, torch.tensor([[True]]), temperature)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])  # rotary and learned positions
def test_a_row_scores_the_same_alone_and_padded(kind):
    model = random_model(kind)
    prompts, completions = [[3, 4], [5, 6, 7]], [[8, 9, 1], [8, 7, 6, 5, 4, 3, 1]]
    together = common.token_logprobs(model, *common.collate(prompts, completions, pad_id=1))
    for row, pair in enumerate(zip(prompts, completions, strict=True)):
        alone = common.token_logprobs(model, *common.collate([pair[0]], [pair[1]], pad_id=1))
        for padded, expected in zip(together, alone, strict=True):
            width = expected.shape[1]
            torch.testing.assert_close(padded[row, :width], expected[0], atol=1e-5, rtol=0)
            assert not padded[row, width:].any()


def test_bfloat16_logits_are_cast_before_the_log_softmax():
    # In bfloat16, log(32,000) = 10.4 has a spacing of 1/16: values are off by hundredths of a nat.
    torch.manual_seed(0)
    model = Table(torch.randn(2, 32_000), torch.bfloat16)
    input_ids = torch.tensor([[0, 1, 0, 1]])
    outputs = common.token_logprobs(model, input_ids, torch.ones(1, 3).bool())
    expected = model.rows.detach().double().log_softmax(-1)
    taken = expected[input_ids[0, :-1], input_ids[0, 1:]]
    entropy = -(expected.exp() * expected).sum(-1)[input_ids[0, :-1]]
    for output, value in zip(outputs, (taken, entropy), strict=True):
        assert output.dtype == torch.float32
        torch.testing.assert_close(output[0].double(), value, atol=1e-4, rtol=0)


def test_an_empty_mask_gives_zeros_and_zero_gradients(tiny_model):
    input_ids, mask = torch.tensor([[2, 10, 3, 11]]), torch.zeros(1, 3).bool()
    outputs = common.token_logprobs(tiny_model, input_ids, mask)
    assert [output.tolist() for output in outputs] == [[[0, 0, 0]]] * 2
    # All processes must have a gradient to reduce: zero, and not None.
    for gradient in gradients(tiny_model, outputs, [1.0, 1.0]).values():
        assert not gradient.any()


@pytest.mark.parametrize(
    "logits, entropy",
    [
        ([0.7] * 5, math.log(5)),  # uniform over 5
        ([0.0, 1e4, 0.0], 0.0),  # one-hot
        ([1.0, 0.0], 0.582),  # the two-armed bandit's (.731, .269)
    ],
)
def test_entropy(logits, entropy):
    model = Table([logits] * len(logits))
    _, output = common.token_logprobs(model, torch.tensor([[0, 1]]), torch.tensor([[True]]))
    assert output.item() == pytest.approx(entropy, abs=5e-4)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("Gemma2", {"final_logit_softcapping": 2.0}),
        ("Cohere", {"logit_scale": 3.0}),
        ("Granite", {"logits_scaling": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
        ("GPTJ", {}),  # its head and Phi's have a bias
        ("Phi", {}),
        ("Llama", {}),
    ],
)
def test_logits_are_scaled_capped_and_shifted_as_by_the_model(kind, options):
    model = random_model(kind, **options)
    common.check_logits(model)
    input_ids, mask = torch.randint(23, (2, 9)), torch.ones(2, 8).bool()
    outputs = common.token_logprobs(model, input_ids, mask)
    for output, expected in zip(outputs, naive(model, input_ids, mask, 1.0), strict=True):
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


def test_a_model_that_computes_other_logits_is_refused():
    model = random_model("Llama")
    own = model.forward

    def forward(**inputs):
        outputs = own(**inputs)
        outputs.logits = 1.1 * outputs.logits
        return outputs

    model.forward = forward
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        common.check_logits(model)


def test_load_model_is_float32_and_without_dropout(tmp_path):
    # Steps of 1e-6 vanish in bfloat16 weights; with dropout an unchanged policy's ratio is not 1.
    dropout = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    random_model("GPT2", **dropout).to(torch.bfloat16).save_pretrained(tmp_path)
    kind = transformers.AutoModelForCausalLM
    model = common.load_model(kind, str(tmp_path), torch.device("cpu")).train()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    batch = common.collate([[3, 4]], [[5, 6, 1]], pad_id=1)
    first, second = (common.token_logprobs(model, *batch)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradient_checkpointing_changes_no_gradient(tiny_model):
    kind, device = transformers.AutoModelForCausalLM, torch.device("cpu")
    model = common.load_model(kind, str(TINY / "model"), device, gradient_checkpointing=True)
    batch = common.collate([[2, 10, 3]], [[11, 12, 5]], pad_id=0)
    plain = gradients(tiny_model, common.token_logprobs(tiny_model, *batch), [1.0, 1.0])
    for name, gradient in gradients(model, common.token_logprobs(model, *batch), [1, 1]).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-5, rtol=1e-5)


# ------------------------------------ KL, weights, means -------------------------------------
LOGITS = torch.tensor([0.3, -0.2], dtype=torch.float64)  # of a policy with two actions
REFERENCE = torch.tensor([0.4, 0.6], dtype=torch.float64).log()


@pytest.mark.parametrize(
    "kind, expected",
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.1065, 0.7183])],
)
def test_kl_estimates(kind, expected):
    # d = .5 and -1: k2 = d²/2, k3 = exp(-d) - 1 + d, so exp(-.5) - .5 and exp(1) - 2
    values = common.kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), kind)
    assert values.tolist() == pytest.approx(expected, abs=1e-4)


def test_an_unknown_kl_estimator_raises():
    with pytest.raises(ValueError, match="k4"):
        common.kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def expected_gradient(kind):
    """Of the estimate as a loss: each action's gradient, weighed with how often it is sampled."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    values = common.kl_estimate(logprobs, REFERENCE, kind)
    (logprobs.exp().detach() * values).sum().backward()
    return logits.grad.tolist()


def test_expected_gradients_of_the_kl_estimates():
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.exp() * (logprobs - REFERENCE)).sum().backward()
    # π = (.6225, .3775), d = (.4423, -.4634), KL = .1004: π_0 (d_0 - KL) = .2128
    assert logits.grad.tolist() == pytest.approx([0.2128, -0.2128], abs=1e-4)
    assert expected_gradient("k2") == pytest.approx(logits.grad.tolist(), abs=1e-9)
    # k3's gradient in logp is 1 - exp(-d) = 1 - ref/π; weighed with π that is π - ref = .2225
    assert expected_gradient("k3") == pytest.approx([0.2225, -0.2225], abs=1e-4)
    assert expected_gradient("k1") == pytest.approx([0, 0], abs=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(kind):
    logprobs = LOGITS.log_softmax(0)
    mean = (logprobs.exp() * common.kl_estimate(logprobs, REFERENCE, kind)).sum()
    assert mean.item() == pytest.approx(0.1004, abs=1e-4)


def test_rollout_weights_are_capped_detached_and_blind_to_what_is_masked():
    ratios = torch.tensor([[0.5, 1.0, 3.0, 1.0, 1.0, 1.0]]).log()
    old = torch.tensor([[-1.0, -1.0, -1.0, math.nan, math.inf, -math.inf]]).requires_grad_()
    mask = torch.tensor([[True, True, True, False, False, False]])
    weights = common.rollout_correction(old, old.detach() - ratios, mask, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.0, 2.0, 0.0, 0.0, 0.0]]))
    assert not weights.requires_grad


def test_rollout_weights_are_capped_where_the_ratio_overflows():
    mask = torch.tensor([[True]])
    weights = common.rollout_correction(torch.tensor([[0.0]]), torch.tensor([[-200.0]]), mask, 2.0)
    assert weights.item() == 2.0


def test_rollout_weights_make_the_engines_samples_unbiased():
    trainer, engine = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.3, 0.3, 0.4])
    weights = common.rollout_correction(
        trainer.log()[None], engine.log()[None], torch.ones(1, 3).bool(), cap=2.0
    )[0]  # the largest ratio is 1.25
    values = torch.tensor([5.0, -1.0, 2.0])
    assert (engine * weights * values).sum().item() == pytest.approx(1.7, abs=1e-5)  # 1 - .3 + 1


def test_masked_mean_ignores_what_is_masked_in_value_and_gradient():
    values = torch.tensor([[1.0, 3.0, math.nan], [8.0, math.inf, math.nan]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    mean = common.masked_mean(values, mask)
    mean.backward()
    assert mean.item() == 4.0
    torch.testing.assert_close(values.grad, mask / 3)


def test_masked_mean_of_nothing_is_0():
    assert common.masked_mean(torch.tensor([math.nan]), torch.tensor([False])).item() == 0.0


# ------------------------------------------ Numbers ------------------------------------------
@pytest.mark.parametrize(
    "text, number",
    [
        ("3 + 2 = 5, so\n#### -5", -5),
        ("#### **12**", 12),
        ("#### 1\n#### 2 and 3 more", 2),
        ("the answer is 3-5", 5),
        ("(3)-5", 5),
        ("x = -5", -5),
        ("x = \N{MINUS SIGN}5", -5),
        ("1,000", 1000),
        ("1,234,567 people", 1234567),
        ("1{,}000", 1000),
        ("first 1, then 20, then 300", 300),
        ("it costs $1,234.50.", Fraction(2469, 2)),
        ("a debt of -$7", -7),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"\boxed{-\dfrac{3}{4}}, out of 9", Fraction(-3, 4)),
        (r"\boxed{\frac{-1}{2}}", Fraction(-1, 2)),
        (r"\boxed{1}, or rather \boxed{\text{about {{2}}}} of 9", 2),
        (r"\boxed{17", 17),
        ("7.0", 7),
        ("14/2", 7),
        ("that is .5", Fraction(1, 2)),
        ("50%", 50),
        ("The sum is 12.", 12),
        ("12/0", None),
        ("no number", None),
        (r"\boxed{}", None),
        ("", None),
        ("#", None),
    ],
)
def test_final_number(text, number):
    assert common.final_number(text) == number


def test_final_number_has_the_exact_value_of_a_decimal():
    assert common.final_number("0.1") == Fraction(1, 10) != Fraction(0.1)


@pytest.mark.parametrize(
    "text, number",
    [
        (r"\boxed{", None),
        (r"\boxed{\frac{", None),
        ("{", None),
        ("}", None),
        ("-", None),
        ("$", None),
        (" ", None),
        ("#### ", None),
        ("####*", None),
        ("7", None),  # over 60 characters are no number
        (",000", None),
        ("1,", 1),
        ("1/", 1),
        ("1 - ", 1),
    ],
)
def test_final_number_ends_on_a_million_repeats(text, number):
    # A search that is quadratic takes hours here; int() refuses a million digits.
    assert common.final_number(text * 1_000_000) == number


@pytest.mark.parametrize(
    "head, repeated",
    [("#### ", " "), ("#### ", "7"), ("1", ",000"), (r"\boxed{", "{"), (r"\boxed{\frac{", "7")],
)
def test_final_number_ends_on_a_million_repeats_after_a_start(head, repeated):
    assert common.final_number(head + repeated * 1_000_000) is None


# ------------------------------------------- Data --------------------------------------------
def data_args(**options):
    """The flags that read_problems uses."""
    args = {"dataset_config": "", "prompt_field": "", "answer_field": "answer"}
    return SimpleNamespace(**{**args, "prompt_template": "{prompt}", **options})


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path as a string."""

    def write(name, *lines):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("field", ["prompt", "question", "problem"])
def test_read_problems_finds_the_usual_prompt_fields(write, field):
    path = write("data.jsonl", {field: "1+1=?", "answer": 2, "more": None})
    assert common.read_problems(path, data_args(), "") == [{"prompt": "1+1=?", "answer": "2"}]


def test_read_problems_takes_the_fields_that_are_named(write):
    path = write("data.jsonl", {"prompt": "no", "q": "yes", "answer": "no", "a": "yes"})
    args = data_args(prompt_field="q", answer_field="a")
    assert common.read_problems(path, args, "") == [{"prompt": "yes", "answer": "yes"}]


def test_prompt_template_is_filled_in_literally(write):
    path = write("data.jsonl", {"prompt": "{x} {0} {prompt} \\1 %s", "answer": "1"})
    args = data_args(prompt_template="{a} Q: {prompt} {}")
    prompt = common.read_problems(path, args, "")[0]["prompt"]
    assert prompt == "{a} Q: {x} {0} {prompt} \\1 %s {}"


def test_chat_messages_are_kept_and_refuse_a_template(write):
    messages = [{"role": "user", "content": "hi"}]
    path = write("data.jsonl", {"prompt": messages, "answer": "1"})
    assert common.read_problems(path, data_args(), "")[0]["prompt"] == messages
    with pytest.raises(ValueError, match="data.jsonl line 1 is not text.*--prompt-template"):
        common.read_problems(path, data_args(prompt_template="Q: {prompt}"), "")


def test_a_line_ends_at_a_newline_and_nowhere_else(write):
    # Other characters that str.splitlines splits at may stand inside a JSON string.
    path = write("data.jsonl", '{"prompt": "a\N{LINE SEPARATOR}b\x85c", "answer": "1"}')
    assert common.read_problems(path, data_args(), "")[0]["prompt"] == "a\N{LINE SEPARATOR}b\x85c"


GOOD = {"prompt": "p", "answer": "a"}


@pytest.mark.parametrize(
    "lines, message",
    [
        ([GOOD, '{"prompt": "p", "ans'], "line 2 is not JSON"),
        ([GOOD, "", "{"], "line 3 is not JSON"),  # an empty line is none, but is counted
        ([GOOD, GOOD, "[1, 2]"], "line 3 is not a JSON object"),
        ([GOOD, {"text": "p", "answer": "a"}], r"line 2 .*'answer', 'text'.*--prompt-field"),
        ([GOOD, {"prompt": "p", "label": "a"}], r"line 2 .*'label', 'prompt'.*--answer-field"),
    ],
)
def test_a_bad_line_is_named(write, lines, message):
    with pytest.raises(ValueError, match=message) as caught:
        common.read_problems(write("data.jsonl", *lines), data_args(), "")
    assert "data.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_file_is_named(write):
    with pytest.raises(ValueError, match="data.jsonl is empty"):
        common.read_problems(write("data.jsonl"), data_args(), "")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="nothing.jsonl"):
        common.read_rows(str(tmp_path / "nothing.jsonl"), "", "")


@pytest.fixture
def hub(write, tmp_path, monkeypatch):
    """Makes a data set as it lies on the hub, in a folder, with a split in each configuration."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def make(*configs):
        lines = ["---", "configs:"]
        for config in configs:
            write(f"hub/{config}.jsonl", {"question": config, "answer": "1"})
            lines += [f"- config_name: {config}", "  data_files:"]
            lines += ["  - split: train", f"    path: {config}.jsonl"]
        write("hub/README.md", *lines, "---")
        return str(tmp_path / "hub")

    return make


def test_hub_splits(write, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write("hub/train.jsonl", {"question": "a", "answer": "1"}, {"question": "b", "answer": "2"})
    write("hub/test.jsonl", {"question": "c", "answer": "3"})
    name = str(tmp_path / "hub")
    prompts = [row["prompt"] for row in common.read_problems(name, data_args(), "train")]
    assert prompts == ["a", "b"]
    assert common.read_problems(name, data_args(), "test") == [{"prompt": "c", "answer": "3"}]
    with pytest.raises(ValueError, match=r"hub.*validation"):
        common.read_rows(name, "", "validation")


@pytest.mark.parametrize(
    "configs, asked, chosen",
    [(["only"], "", "only"), (["socratic", "main"], "", "main"), (["a", "b"], "b", "b")],
)
def test_hub_configuration(hub, configs, asked, chosen):
    problems = common.read_problems(hub(*configs), data_args(dataset_config=asked), "train")
    assert problems == [{"prompt": chosen, "answer": "1"}]


def test_hub_configuration_must_be_named_where_there_are_several(hub):
    with pytest.raises(ValueError, match=r"\['a', 'b'\].*--dataset-config"):
        common.read_rows(hub("a", "b"), "", "train")


@pytest.mark.parametrize("count, per_step", [(20, 4), (20, 6), (3, 7), (5, 5)])
def test_every_problem_comes_once_in_each_pass(count, per_step):
    problems, steps = list(range(count)), 3 * count  # whole passes: 3 * per_step of them
    chosen = [common.problems_of_step(problems, s, per_step, 0) for s in range(1, steps + 1)]
    assert {len(part) for part in chosen} == {per_step}
    order = sum(chosen, [])
    passes = [order[i : i + count] for i in range(0, len(order), count)]
    assert all(sorted(part) == problems for part in passes)
    assert len(set(map(tuple, passes))) > 1  # and not in the same order each time


def test_problems_of_a_step_are_a_function_of_seed_and_step():
    problems = list(range(20))
    first = common.problems_of_step(problems, 7, 4, seed=3)
    common.problems_of_step(problems, 8, 4, seed=3)
    assert common.problems_of_step(problems, 7, 4, seed=3) == first
    assert common.problems_of_step(problems, 7, 4, seed=4) != first
    assert problems == list(range(20))


def test_seeds_differ_between_runs_steps_and_processes():
    parts = list(itertools.product(range(3), range(1, 51), range(8)))
    seeds = [common.seed_of(*part) for part in parts]
    assert len(set(seeds)) == len(parts) and seeds == [common.seed_of(*part) for part in parts]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len({common.seed_of(1, 2, 3), common.seed_of(12, 3), common.seed_of(1, 23)}) == 3


@pytest.mark.parametrize("count", [0, 1, 7, 16])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_shares_cover_a_list_once(monkeypatch, count, processes):
    monkeypatch.setattr(common, "world_size", lambda: processes)
    shares = []
    for rank in range(processes):
        monkeypatch.setattr(common, "rank", lambda rank=rank: rank)
        shares.append(common.share(list(range(count))))
    assert sum(shares, []) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# ------------------------------------------ Rewards ------------------------------------------
PROBLEMS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "2+2=?", "answer": "4"}]


def test_score_hands_over_prompt_completion_and_answer_in_this_order():
    seen = []
    rewards = common.score(PROBLEMS, ["x", "y"], lambda *inputs: seen.append(inputs) or len(seen))
    assert seen == [("1+1=?", "x", "2"), ("2+2=?", "y", "4")]
    assert rewards == [1.0, 2.0] and {type(value) for value in rewards} == {float}


def test_a_reward_that_raises_ends_the_run_with_its_own_error_and_line():
    def reward(prompt, completion, answer):
        raise KeyError("my own words")

    with pytest.raises(SystemExit) as caught:
        common.score(PROBLEMS, ["x", "y"], reward)
    line = reward.__code__.co_firstlineno + 1
    for part in ("KeyError", "my own words", f"test_common.py line {line}", "1+1=?"):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_ends_the_run_and_is_named(value):
    with pytest.raises(SystemExit) as caught:
        common.score(PROBLEMS, ["x", "y"], lambda prompt, *rest: value if "2+2" in prompt else 1)
    assert str(value) in str(caught.value) and "2+2=?" in str(caught.value)
    assert "1+1=?" not in str(caught.value)


def save_classifier(path, tokenizer, labels):
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(TINY / "model", num_labels=labels)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


def test_reward_model_scores_the_prompt_the_completion_and_eos(tmp_path, tokenizer):
    model = save_classifier(tmp_path, tokenizer, labels=1)
    scorer = common.RewardModel(str(tmp_path), torch.device("cpu"))
    assert tokenizer.eos_token_id == 5
    ids = common.encode_prompt(tokenizer, "1+1=?") + tokenizer("2 is it")["input_ids"] + [5]
    hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    expected = model.score(hidden).item()
    assert scorer("1+1=?", "2 is it", "unused") == pytest.approx(expected, abs=1e-5)


def test_reward_model_with_two_labels_is_refused(tmp_path, tokenizer):
    save_classifier(tmp_path, tokenizer, labels=2)
    with pytest.raises(SystemExit, match="one label, not 2"):
        common.RewardModel(str(tmp_path), torch.device("cpu"))


def test_reward_model_that_is_not_there_ends_the_run_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="--reward-model") as caught:
        common.RewardModel(str(tmp_path / "nothing"), torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_rollout_metrics():
    # Two groups of two: one uniform. Ended: all but [5, 5].
    rollouts = [1.0, 1.0, 0.0, 1.0], [[2], [5, 2], [5, 5], [7]], {2, 7}, 2
    metrics = common.rollout_metrics([10.0, 12.0, 12.5, 14.0], *rollouts)
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(3 / 16))
    assert metrics["reward/uniform_groups"] == 0.5
    assert metrics["generation/length"] == 1.5
    assert metrics["generation/truncated"] == 0.25
    seconds = [metrics[f"time/{phase}"] for phase in ("generate", "score", "update", "step")]
    assert seconds == [2.0, 0.5, 1.5, 4.0]
    assert metrics["throughput/tokens_per_second"] == 6 / 4


# --------------------------------------- Micro-batches ---------------------------------------
def random_batch(rows, seed=0):
    """A batch whose rows all differ in their ids, of prompts and completions of any length."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (rows, 2), generator=generator).tolist()
    problems = [{"ids": [10 + row] * size} for row, (size, _) in enumerate(sizes)]
    completions = [[50 + row] * size for row, (_, size) in enumerate(sizes)]
    batch = common.make_batch(problems, completions, [[-1.0] * n for _, n in sizes], pad_id=0)
    batch["advantages"] = torch.arange(rows, dtype=torch.float32)[:, None]
    return batch


@pytest.mark.parametrize("budget", [1, 17, 40, 10_000])
def test_micro_batches_have_every_row_once_and_keep_to_the_budget(budget):
    batch, chosen = random_batch(13), [12, 3, 5, 0, 7, 8]
    before, seen = {name: tensor.clone() for name, tensor in batch.items()}, []
    for rows, piece in common.micro_batches(batch, chosen, budget, torch.device("cpu")):
        assert piece["input_ids"].numel() <= budget or len(rows) == 1
        width = piece["mask"].shape[1]
        assert piece["input_ids"].shape[1] == width + 1 and piece["mask"][:, -1].any()
        for i, row in enumerate(rows):
            assert torch.equal(piece["input_ids"][i], batch["input_ids"][row, : width + 1])
            assert torch.equal(piece["mask"][i], batch["mask"][row, :width])
            assert not batch["mask"][row, width:].any()  # no token was cut off
            assert piece["advantages"][i].tolist() == [row]
        seen += rows
    assert Counter(seen) == Counter(chosen)
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_a_large_budget_is_used():
    parts = list(common.micro_batches(random_batch(13), range(13), 10_000, torch.device("cpu")))
    assert len(parts) == 1


@pytest.mark.parametrize("rows", [[], [2]])
def test_a_process_with_fewer_parts_gets_empty_ones(monkeypatch, rows):
    monkeypatch.setattr(common, "across", lambda *inputs: torch.tensor(3))  # another one has 3
    batch = random_batch(4)
    parts = list(common.micro_batches(batch, rows, 100, torch.device("cpu")))
    assert [part for part, _ in parts] == ([rows] if rows else []) + [[]] * (3 - len(rows))
    for part, piece in parts:
        assert piece["mask"].any() == bool(part) and len(piece["input_ids"]) == 1
    assert batch["mask"].any(1).all()


def test_batch_logprobs_are_those_of_the_rows_to_be_trained(tiny_model):
    batch = random_batch(5)
    args = SimpleNamespace(tokens_per_micro_batch=30, temperature=0.7)
    autocast = torch.autocast("cpu", enabled=False)
    everyone = common.batch_logprobs(tiny_model, batch, args, autocast)
    batch["trained"] = torch.tensor([[False], [True], [True], [False], [True]])
    logprobs = common.batch_logprobs(tiny_model, batch, args, autocast)
    expected, _ = naive(tiny_model, batch["input_ids"], batch["mask"], 0.7)
    torch.testing.assert_close(logprobs[[1, 2, 4]], expected[[1, 2, 4]], atol=1e-5, rtol=1e-5)
    assert not logprobs[[0, 3]].any() and not logprobs.requires_grad
    torch.testing.assert_close(everyone, expected, atol=1e-5, rtol=1e-5)


def test_minibatches_have_every_row_once_an_epoch_in_another_order():
    parts = [part.tolist() for part in common.minibatches(12, 3, epochs=2, seed=1)]
    assert [len(part) for part in parts] == [4] * 6
    first, second = sum(parts[:3], []), sum(parts[3:], [])
    assert sorted(first) == sorted(second) == list(range(12)) and first != second


def test_a_score_stands_at_the_last_token_and_not_after_it():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).bool()
    scores = common.at_last_token(torch.tensor([1.0, 2.0]), mask)
    assert scores.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2]]


def test_totals_are_means_over_tokens_whatever_the_micro_batches():
    # Token values 1, 2, 6 and mismatches 0, .5, .1: means 3 and .2 over 3 tokens of 5 positions.
    totals = common.Totals()
    parts = [([[True, True, False]], [[1, 2, math.nan]], [[0, 0.5, math.nan]])]
    parts += [([[True, False]], [[6, math.inf]], [[0.1, 9]])]
    for mask, values, mismatch in parts:
        metrics = {"a": torch.tensor(values), "engine/mismatch": torch.tensor(mismatch)}
        totals.count(torch.tensor(mask), torch.tensor(0.25), metrics)
    totals.norms = [1.0, 3.0]
    metrics = totals.metrics()
    assert metrics["a"] == pytest.approx(3) and metrics["engine/mismatch"] == pytest.approx(0.2)
    assert metrics["engine/mismatch_max"] == 0.5
    assert metrics["policy/grad_norm"] == 2 and metrics["loss/policy"] == 0.25  # of 2 updates
    assert metrics["throughput/padding"] == pytest.approx(2 / 5)


def test_gradient_is_clipped_to_a_norm_and_must_be_finite():
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert common.clip_gradient(model, 1.0) == pytest.approx(5)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=0)
    model.weight.grad = torch.tensor([[math.nan, 1.0]])
    with pytest.raises(SystemExit, match="nan"):
        common.clip_gradient(model, 1.0)


@pytest.mark.parametrize("mismatch, refused", [(None, 0), (0.1, 0), (0.2, 1), (math.nan, 1)])
def test_an_engine_that_differs_from_the_trainer_stops_the_run(mismatch, refused):
    if not refused:
        common.check_mismatch(mismatch, 0.1)
        return
    with pytest.raises(SystemExit, match="--mismatch-limit"):
        common.check_mismatch(mismatch, 0.1)


# ------------------------------------------ Engine -------------------------------------------
PROMPTS = ["1+1=?", "9+8-7+6=?"]  # of different lengths, so one is padded


@pytest.fixture
def prompts(tokenizer):
    return [common.encode_prompt(tokenizer, prompt) for prompt in PROMPTS]


def make_engine(path=TINY / "model", stop_ids=(5,), pad_id=0, budget=1000):
    args = SimpleNamespace(model=str(path), tokens_per_micro_batch=budget)
    return common.TransformersEngine(args, set(stop_ids), pad_id, "cpu", torch.float32)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("pad_id", [0, 5])  # 5 is EOS
def test_engine_logprobs_are_the_trainers(tiny_model, prompts, temperature, pad_id):
    completions, logprobs = make_engine(pad_id=pad_id).generate(prompts, 8, temperature, 12, seed=1)
    assert {len(row) < 12 for row in completions} == {True, False}  # ended and cut ones
    rows = [prompt for prompt in prompts for _ in range(8)]
    batch = common.make_batch([{"ids": row} for row in rows], completions, logprobs, pad_id)
    expected, _ = naive(tiny_model, batch["input_ids"], batch["mask"], temperature)
    torch.testing.assert_close(batch["engine_logprobs"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stop_ids, pad_id", [({5}, 0), ({5}, 5), ({5, 10, 11, 12}, 0)])
def test_completions_end_with_their_first_stop_token_or_are_cut(prompts, stop_ids, pad_id):
    engine = make_engine(stop_ids=stop_ids, pad_id=pad_id)
    completions, logprobs = engine.generate(prompts, 16, 1.0, 12, seed=1)
    assert len(completions) == 32 and list(map(len, completions)) == list(map(len, logprobs))
    for ids in completions:
        assert not stop_ids & set(ids[:-1])
        assert ids[-1] in stop_ids or len(ids) == 12


def test_samples_differ_within_a_group_and_repeat_with_the_seed(prompts):
    engine = make_engine()
    first = engine.generate(prompts, 8, 1.0, 12, seed=1)
    assert len(set(map(tuple, first[0][:8]))) > 1
    assert engine.generate(prompts, 8, 1.0, 12, seed=1) == first
    assert engine.generate(prompts, 8, 1.0, 12, seed=2)[0] != first[0]


def test_the_checkpoints_sampling_settings_do_not_leak(tmp_path, prompts):
    shutil.copytree(TINY / "model", tmp_path / "model")
    settings = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "temperature": 0.1}
    settings |= {"eos_token_id": 5, "min_new_tokens": 11, "suppress_tokens": [10, 11, 12]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    engine, other = make_engine(), make_engine(tmp_path / "model")
    assert other.model.generation_config.top_k == 1  # the trap is set
    for temperature in (0.0, 1.0):
        expected = engine.generate(prompts, 4, temperature, 12, seed=1)
        assert other.generate(prompts, 4, temperature, 12, seed=1) == expected


def test_samples_are_drawn_from_the_whole_vocabulary(tmp_path):
    # Nearly uniform over 100 tokens, each is missing from 3,000 samples with probability e^-30.
    # generate() has a top-k of 50 where none is given.
    random_model("Llama", vocab_size=100, initializer_range=1e-3).save_pretrained(tmp_path)
    completions, _ = make_engine(tmp_path, budget=9000).generate([[3, 4]], 3000, 1.0, 1, seed=0)
    assert {ids[0] for ids in completions} == set(range(100))


@pytest.mark.parametrize("budget", [1, 1000])  # a row at a time, and all at once
def test_greedy_is_the_argmax_and_rows_are_in_order(tiny_model, prompts, budget):
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 10 and ids[-1] != 5:
            ids.append(tiny_model(torch.tensor([ids])).logits[0, -1].argmax().item())
        expected += [ids[len(prompt) :]] * 2
    assert expected[0] != expected[2]
    assert make_engine(budget=budget).generate(prompts, 2, 0.0, 10, seed=0)[0] == expected


def test_engine_without_prompts_returns_nothing():
    assert make_engine().generate([], 4, 1.0, 12, seed=0) == ([], [])


def test_sync_copies_all_weights_and_keeps_the_head_tied(tiny_model, prompts):
    engine = make_engine()
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    engine.sync(common.full_weights(tiny_model))
    synced = engine.model.state_dict()
    assert all(torch.equal(synced[name], w) for name, w in tiny_model.state_dict().items())
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    # Copied and not shared, or an update would change the engine's weights before the next sync.
    assert engine.model.lm_head.weight.data_ptr() != tiny_model.lm_head.weight.data_ptr()
    completions, logprobs = engine.generate(prompts, 1, 1.0, 8, seed=0)
    batch = common.make_batch([{"ids": p} for p in prompts], completions, logprobs, 0)
    expected, _ = naive(tiny_model, batch["input_ids"], batch["mask"], 1.0)
    torch.testing.assert_close(batch["engine_logprobs"], expected, atol=1e-4, rtol=0)


# ------------------------------------------- Disk --------------------------------------------
def trained_pair(steps, seed=0):
    """A small model and its optimizer after some steps."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def test_the_last_two_checkpoints_are_kept(run_dir):
    for step in (9, 10, 100):
        common.save_checkpoint(run_dir, step, policy=trained_pair(1))
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["step-000010", "step-000100"]


def test_a_resumed_optimizer_goes_on_as_if_never_stopped(run_dir):
    model, optimizer = trained_pair(3)
    common.save_checkpoint(run_dir, 3, policy=(model, optimizer))
    train(model, optimizer, 2)
    other = trained_pair(1, seed=9)
    assert common.load_checkpoint(run_dir, 10, policy=other) == 3
    train(*other, 2)
    assert torch.equal(other[0].weight, model.weight)


def test_what_is_half_saved_is_never_read(run_dir, monkeypatch):
    saved = trained_pair(3)
    common.save_checkpoint(run_dir, 3, policy=saved)

    def killed(state, checkpoint_id, **options):
        checkpoint_id.mkdir()
        (checkpoint_id / "half").touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(common.dcp, "save", killed)
    with pytest.raises(SystemExit, match="cannot save step 6.*No space left"):
        common.save_checkpoint(run_dir, 6, policy=saved)
    monkeypatch.undo()
    loaded = trained_pair(1, seed=9)
    assert common.load_checkpoint(run_dir, 10, policy=loaded) == 3
    assert torch.equal(loaded[0].weight, saved[0].weight)
    common.save_checkpoint(run_dir, 6, policy=loaded)  # the half is in nobody's way
    assert not list(run_dir.glob("checkpoints/*/half"))
    assert common.load_checkpoint(run_dir, 10, policy=loaded) == 6


def test_rows_after_the_checkpoint_are_cut_off(run_dir):
    common.save_checkpoint(run_dir, 2, policy=trained_pair(1))
    rows = [{"step": step, "text": "a\N{LINE SEPARATOR}b"} for step in (0, 1, 2, 2, 3)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    for name in ("metrics.jsonl", "samples.jsonl"):
        (run_dir / name).write_text("".join(lines) + '{"step": 4, "te', encoding="utf-8")
    common.load_checkpoint(run_dir, 10, policy=trained_pair(1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (run_dir / name).read_text(encoding="utf-8") == "".join(lines[:4])


def test_a_half_written_row_is_cut_off_though_it_is_json(run_dir):
    # Without its newline the next row would be written on the same line.
    common.save_checkpoint(run_dir, 2, policy=trained_pair(1))
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    common.load_checkpoint(run_dir, 10, policy=trained_pair(1))
    common.write_rows(run_dir / "metrics.jsonl", [{"step": 3}])
    assert [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")] == [1, 3]


def test_numbers_are_part_of_a_checkpoint(run_dir):
    common.save_checkpoint(run_dir, 3, {"baseline": 0.25}, policy=trained_pair(1))
    numbers = {"baseline": 0.0}
    common.load_checkpoint(run_dir, 10, numbers, policy=trained_pair(1))
    assert numbers == {"baseline": 0.25}


def test_a_run_without_checkpoint_or_steps_to_do_is_refused(run_dir):
    with pytest.raises(SystemExit, match="no checkpoint"):
        common.load_checkpoint(run_dir, 10, policy=trained_pair(1))
    common.save_checkpoint(run_dir, 10, policy=trained_pair(1))
    assert common.load_checkpoint(run_dir, 10, policy=trained_pair(1)) == 10  # the model is to save
    (run_dir / "model").mkdir()
    with pytest.raises(SystemExit, match="--steps"):
        common.load_checkpoint(run_dir, 10, policy=trained_pair(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_with_the_same_logits_and_tied(tiny_model, tokenizer, tmp_path, dtype):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()  # what is there already is replaced
    with torch.no_grad():
        tiny_model.lm_head.weight.add_(0.01)  # not what the checkpoint has
    common.save_model(tmp_path / "model", tiny_model, tokenizer, dtype)
    kind = transformers.AutoModelForCausalLM
    loaded = kind.from_pretrained(tmp_path / "model", dtype="auto")
    assert loaded.dtype == dtype and tiny_model.dtype == torch.float32
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        for weight in tiny_model.parameters():
            weight.copy_(weight.to(dtype))  # rounded as they were saved
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.float()(ids).logits, tiny_model(ids).logits)
    assert common.load_tokenizer(tmp_path / "model")("1+1").input_ids == tokenizer("1+1").input_ids
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "old").exists()


def test_open_run_refuses_a_folder_in_use(tmp_path):
    args = grpo.Args(output_dir=str(tmp_path / "new" / "run"), seed=3)
    assert common.open_run(args, "grpo") == tmp_path / "new" / "run"
    saved = json.loads((tmp_path / "new" / "run" / "args.json").read_text())
    assert saved == {"script": "grpo", "processes": 1, **vars(args)}
    common.open_run(args, "grpo")  # nothing has been written yet that could be lost
    (tmp_path / "new" / "run" / "metrics.jsonl").touch()
    with pytest.raises(SystemExit, match="is not an empty folder"):
        common.open_run(args, "grpo")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="is not an empty folder"):
        common.open_run(grpo.Args(output_dir=str(tmp_path / "file")), "grpo")
    (tmp_path / "empty").mkdir()
    assert common.open_run(grpo.Args(output_dir=str(tmp_path / "empty")), "grpo").is_dir()


# ------------------------------------------- Flags -------------------------------------------
@pytest.fixture
def parse(monkeypatch):
    """What grpo.py makes of a command line."""

    def parse(*flags, script="grpo"):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, flags)])
        return common.parse_args(grpo.Args, grpo.TINY, "description")

    return parse


@pytest.mark.parametrize("flags", [[], ["--seed", "7"]])
def test_without_model_and_dataset_the_tiny_task_is_run(parse, flags):
    assert parse(*flags) == grpo.Args(**grpo.TINY, seed=7 if flags else 0)


@pytest.mark.parametrize("flags", [["--model", "m"], ["--dataset=d.jsonl"]])
def test_with_model_or_dataset_nothing_is_tiny(parse, flags):
    chosen = {"model": "m"} if "m" in flags else {"dataset": "d.jsonl"}
    assert parse(*flags) == grpo.Args(**chosen)


def test_help_has_every_flag_below_its_group(parse, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    text = capsys.readouterr().out
    assert not caught.value.code
    # In the order of Args, a group's heading right before its first flag.
    first = {"model": "data", "steps": "rollouts", "minibatches": "algorithm"}
    first |= {"learning_rate": "optimizer", "rollout_engine": "engine", "eval_every": "logging"}
    expected = []
    for name in vars(grpo.Args()):
        expected += [first.pop(name)] if name in first else []
        expected.append(f"--{name.replace('_', '-')}")
    # Lines that are the rest of a help text stand further to the right.
    shown = re.findall(r"^\W{1,3}(--\w[\w-]+|\w+(?= options))", text, re.MULTILINE)
    assert shown == expected


@pytest.fixture
def old_run(tmp_path):
    args = grpo.Args(**grpo.TINY, seed=5)
    (tmp_path / "args.json").write_text(json.dumps({"script": "grpo", **vars(args)}))
    return tmp_path


def test_resume_keeps_the_runs_flags_and_takes_harmless_ones(parse, old_run):
    args = parse("--resume", old_run, "--steps", 99, "--save-every", 3)
    expected = {**grpo.TINY, "seed": 5, "resume": str(old_run), "steps": 99, "save_every": 3}
    assert args == grpo.Args(**expected)


@pytest.mark.parametrize(
    "flag, value",
    [("--learning-rate", 0.5), ("--model", "m"), ("--seed", 6), ("--prompts-per-step", 32)],
)
def test_resume_refuses_a_changed_flag_by_name(parse, old_run, flag, value):
    with pytest.raises(SystemExit, match=f"{flag} {value} would make it another run"):
        parse("--resume", old_run, flag, value)


def test_resume_takes_a_flag_with_the_value_that_it_had(parse, old_run):
    assert parse("--resume", old_run, "--seed", 5).seed == 5


def test_resume_refuses_another_scripts_run_and_a_missing_one(parse, old_run):
    with pytest.raises(SystemExit, match="not a run of rloo.py"):
        parse("--resume", old_run, script="rloo")
    with pytest.raises(SystemExit, match="--resume"):
        parse("--resume", old_run / "nothing")


@pytest.mark.parametrize(
    "flag, value",
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("learning_rate", math.nan),
        ("max_grad_norm", math.inf),
        ("steps", 0),
        ("prompts_per_step", -4),
        ("prompt_template", "no place"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_by_name(flag, value):
    with pytest.raises(SystemExit, match=f"--{flag.replace('_', '-')}"):
        common.check_flags(grpo.Args(**{flag: value}))


def test_prompts_per_step_must_divide_by_the_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert common.check_flags(grpo.Args(prompts_per_step=12)) == 3
    with pytest.raises(SystemExit, match="--prompts-per-step 10"):
        common.check_flags(grpo.Args(prompts_per_step=10))
