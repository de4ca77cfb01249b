"""common.py: text and tokens, log-probabilities, estimators, and sampling without vLLM.

Numbers are worked out by hand or by enumeration next to the test that uses them; where a function
has a naive form (log_softmax over all logits, a forward pass per token), that is the reference.
"""

import copy
import math
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from conftest import naive, near
from tokenizers import models, pre_tokenizers, processors

import common

NAN, INF = math.nan, math.inf
# ---------------------------------------- Tokenizers ----------------------------------------
BOS, EOS, UNK, HI, USER, ASSISTANT = range(6)
WORDS = {"<s>": BOS, "</s>": EOS, "<unk>": UNK, "hi": HI, "user": USER, "assistant": ASSISTANT}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
NO_BOS = TEMPLATE.replace("{{ bos_token }}", "")
CHAT = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %} hi{% endif %}"


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


def test_load_tokenizer_sets_a_padding_token_and_wants_an_eos(make_tokenizer, tmp_path):
    assert make_tokenizer().pad_token_id == EOS
    assert make_tokenizer(pad_token="<unk>").pad_token_id == UNK
    with pytest.raises(ValueError, match="no EOS"):
        make_tokenizer(eos_token=None)
    with pytest.raises((ValueError, OSError)):
        common.load_tokenizer(tmp_path / "nothing here")


@pytest.mark.parametrize(
    "template, added, prompt, expected",
    [
        # The trap: encoding the template's text adds a BOS of its own.
        (TEMPLATE, "<s> $A", "hi", [BOS, USER, HI, ASSISTANT]),
        (TEMPLATE, "<s> $A", "<s> hi", [BOS, USER, HI, ASSISTANT]),
        (TEMPLATE, "<s> $A", "<s> <s> hi", [BOS, USER, HI, ASSISTANT]),
        (TEMPLATE, "<s> $A", "hi </s>", [BOS, USER, HI, EOS, ASSISTANT]),  # the user's own is kept
        (TEMPLATE, "<s> $A", CHAT, [BOS, USER, HI, ASSISTANT, HI, USER, HI, ASSISTANT]),
        (NO_BOS, "<s> $A", "hi", [USER, HI, ASSISTANT]),
        (NO_BOS, "<s> $A", "<s> hi", [USER, HI, ASSISTANT]),  # none the template does not write
        (THINKING, "<s> $A", "hi", [BOS, USER, HI, ASSISTANT, HI]),
        (None, "<s> $A", "hi", [BOS, HI]),
        (None, "<s> $A </s>", "hi", [BOS, HI]),  # it would end the text before the completion
        (None, "$A </s>", "hi", [HI]),
        (None, "$A", "hi", [HI]),
        (None, "<s> $A", "<s> hi", [BOS, HI]),
        (None, "<s> $A", "<s> <s> hi", [BOS, HI]),
        (None, "$A", "<s> <s> hi", [BOS, HI]),
        (None, "<s> $A </s>", "hi </s>", [BOS, HI, EOS]),
    ],
)
def test_a_template_is_applied_once_and_there_is_one_bos_at_most(
    make_tokenizer, template, added, prompt, expected
):
    tokenizer, forms = make_tokenizer(template, added), [prompt]
    if template and isinstance(prompt, str):
        parts = [{"type": "text", "text": prompt[:1]}, {"type": "text", "text": prompt[1:]}]
        forms += [[{"role": "user", "content": content}] for content in (prompt, parts)]
    for form in forms:
        given = copy.deepcopy(form)
        assert common.encode_prompt(tokenizer, given) == expected
        assert given == form  # the data's row is not changed


def test_a_bos_that_is_the_eos_too_is_kept(make_tokenizer):
    tokenizer = make_tokenizer(added="</s> $A", bos_token="</s>")
    assert common.encode_prompt(tokenizer, "hi") == [EOS, HI]


IMAGE = [{"type": "text", "text": "hi"}, {"type": "image", "image": "x.png"}]


@pytest.mark.parametrize(
    "template, prompt, words",
    [
        (TEMPLATE, [{"role": "user", "content": IMAGE}], "image"),
        (None, [{"role": "user", "content": "hi"}], "chat template"),
        (None, "hi \ud800", "surrogate"),
        (TEMPLATE, "hi \ud800", "surrogate"),
    ],
)
def test_what_cannot_be_encoded_raises(make_tokenizer, template, prompt, words):
    with pytest.raises(ValueError, match=words):
        common.encode_prompt(make_tokenizer(template), prompt)


# -------------------------------------- Stops and masks --------------------------------------
@pytest.mark.parametrize("listed, expected", [(None, {2}), (7, {2, 7}), ([7, 9], {2, 7, 9})])
def test_stop_ids_are_the_tokenizers_and_the_generation_configs(listed, expected):
    config = transformers.GenerationConfig(eos_token_id=listed)
    assert common.stop_token_ids(SimpleNamespace(eos_token_id=2), config) == expected


def test_truncate_at_stop():
    assert common.truncate_at_stop([5, 7, 9, 0], {2, 7}) == ([5, 7], True)
    assert common.truncate_at_stop([2, 2], {2}) == ([2], True)
    assert common.truncate_at_stop([5, 6], {2}) == ([5, 6], False)
    assert common.truncate_at_stop([], {2}) == ([], False)


def test_mask_is_true_on_completions_and_their_stop_token_alone():
    # Engines return rows padded with EOS (2) after the first one, which alone is trained on.
    rows = [[5, 6, 2, 2, 2], [2, 2], [5, 6, 5, 6]]
    completions = [common.truncate_at_stop(row, {2})[0] for row in rows]
    input_ids, mask = common.collate([[8], [8], [8, 9]], completions, pad_id=2)
    assert input_ids.tolist() == [[8, 5, 6, 2, 2, 2], [8, 2, 2, 2, 2, 2], [8, 9, 5, 6, 5, 6]]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    assert mask.dtype == torch.bool  # column t is about input_ids[:, t + 1]


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
    sizes |= {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4}
    sizes |= {"initializer_range": 0.5, "pad_token_id": 0, **options}
    config = getattr(transformers, f"{kind}Config")(bos_token_id=None, eos_token_id=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:  # is made as zeros, which would hide that it is left out
        torch.nn.init.normal_(bias)
    return model


def gradients(model, outputs, weights):
    """Gradients of a weighted sum of log-probs and entropies in every parameter of the model."""
    model.zero_grad()
    pairs = zip(outputs, weights, strict=True)
    sum((output * weight).sum() for output, weight in pairs if weight is not None).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


KINDS = [("Gemma2", {"final_logit_softcapping": 2.0}), ("Cohere", {"logit_scale": 3.0})]
KINDS += [("Granite", {"logits_scaling": 0.25}), ("Granite", {"logits_scaling": 4.0})]
KINDS += [("GPTJ", {}), ("Phi", {}), ("Llama", {})]  # the first two have a bias


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("temperature, chunk_size", [(0.5, 1), (1.7, 3), (1.0, 1000)])
@pytest.mark.parametrize("used", ["both", "log-probs", "entropies"])
def test_equals_log_softmax_and_gather_in_value_and_gradient(
    kind, options, temperature, chunk_size, used
):
    model = random_model(kind, **options)
    common.check_logits(model)
    prompts, completions = [[2, 10, 11, 3], [2, 12, 3]], [[10, 11, 5], [12, 13, 14, 15, 5]]
    input_ids, mask = common.collate(prompts, completions, pad_id=5)
    weights = list(torch.randn(2, *mask.shape))
    if used != "both":
        weights[used == "log-probs"] = None  # as where a loss uses but one of the two
    expected = naive(model, input_ids, mask, temperature)
    expected_gradients = gradients(model, expected, weights)

    outputs = common.token_logprobs(model, input_ids, mask, temperature, chunk_size)
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == torch.float32 and output.shape == mask.shape
        assert not output[~mask].any()
        near(output, value, atol=1e-5)
    found = gradients(model, outputs, weights)
    torch.testing.assert_close(found, expected_gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.01, 2.0])  # the flags' limits
def test_logits_of_hundreds_stay_finite(temperature):
    model, ids = Table([[300.0, -300.0, 0.0]] * 3), torch.tensor([[0, 1]])
    outputs = common.token_logprobs(model, ids, torch.tensor([[True]]), temperature)
    assert outputs[0].item() == pytest.approx(-600 / temperature)  # the logits' difference
    assert outputs[1].item() == pytest.approx(0, abs=1e-6)
    sum(output.sum() for output in outputs).backward()
    near(model.rows.grad[0], torch.tensor([-1.0, 1.0, 0.0]) / temperature)


@pytest.mark.parametrize("temperature", [0, -1.0, NAN])
def test_a_temperature_that_is_not_positive_raises(temperature):
    model, ids = Table([[0.0, 0.0]] * 2), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="temperature"):
        common.token_logprobs(model, ids, torch.tensor([[True]]), temperature)


def test_bfloat16_logits_are_cast_before_the_log_softmax():
    # In bfloat16, log(32,000) = 10.4 has a spacing of 1/16: values are off by hundredths of a nat.
    torch.manual_seed(0)
    model = Table(torch.randn(2, 32_000), torch.bfloat16)
    input_ids = torch.tensor([[0, 1, 0, 1]])
    outputs = common.token_logprobs(model, input_ids, torch.ones(1, 3).bool(), chunk_size=2)
    exact = model.rows.detach().double().requires_grad_()
    logprobs = exact[[0, 1, 0]].log_softmax(-1)
    taken, entropies = logprobs[[0, 1, 2], [1, 0, 1]], -(logprobs.exp() * logprobs).sum(-1)
    for output, value in zip(outputs, (taken, entropies), strict=True):
        assert output.dtype == torch.float32
        near(output[0].double(), value, atol=1e-4)
    outputs[0].sum().backward()
    taken.sum().backward()
    assert model.rows.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.rows.grad.double(), exact.grad, rtol=0.02, atol=1e-6)


def test_an_empty_mask_gives_zeros_and_zero_gradients(tiny_model):
    input_ids, mask = torch.tensor([[2, 10, 3, 11]]), torch.zeros(1, 3).bool()
    outputs = common.token_logprobs(tiny_model, input_ids, mask)
    assert [output.tolist() for output in outputs] == [[[0, 0, 0]]] * 2
    # All processes must have a gradient to reduce: zero, and not None.
    for gradient in gradients(tiny_model, outputs, [1.0, 1.0]).values():
        assert not gradient.any()


def test_a_model_that_computes_other_logits_is_refused():
    model = random_model("Llama")
    model.config.logit_scale = 1.1  # which Cohere's forward uses, and this one does not
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        common.check_logits(model)


# --------------------------------------- KL and weights --------------------------------------
def test_bounded_exp_is_exp_and_from_20_on_its_tangent():
    x = torch.tensor([0.0, math.log(1.5), -200.0, 19.0, 25.0, 1e5], requires_grad=True)
    found = common.bounded_exp(x)
    found.sum().backward()
    top = math.exp(20)  # the tangent is e^20 (1 + x - 20)
    values = torch.tensor([1.0, 1.5, 0.0, math.exp(19), 6 * top, (1e5 - 19) * top])
    torch.testing.assert_close(found.detach(), values, rtol=1e-4, atol=1e-12)
    slopes = torch.tensor([1.0, 1.5, 0.0, math.exp(19), top, top])
    torch.testing.assert_close(x.grad, slopes, rtol=1e-4, atol=1e-12)


LOGITS = torch.tensor([0.3, -0.2], dtype=torch.float64)  # of a policy with two actions
REFERENCE = torch.tensor([0.4, 0.6], dtype=torch.float64).log()


# d = .5 and -1: k2 = d²/2, k3 = exp(-d) - 1 + d, so exp(-.5) - .5 and exp(1) - 2. Then the expected
# gradient of each as a loss. π = (.6225, .3775), d = (.4423, -.4634), KL = .1004, and the KL's own
# gradient is π_0 (d_0 - KL) = .2128. k3's in logp is 1 - exp(-d) = 1 - ref/π: π - ref = .2225.
@pytest.mark.parametrize(
    "kind, values, gradient",
    [("k1", [0.5, -1.0], 0.0), ("k2", [0.125, 0.5], 0.2128), ("k3", [0.1065, 0.7183], 0.2225)],
)
def test_kl_estimates_and_their_expectations(kind, values, gradient):
    found = common.kl_estimate(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]), kind)
    near(found, values, atol=1e-4)
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    weighed = (logprobs.exp().detach() * common.kl_estimate(logprobs, REFERENCE, kind)).sum()
    weighed.backward()
    near(logits.grad, [gradient, -gradient], atol=1e-4)
    if kind != "k2":  # their mean is the KL
        assert weighed.item() == pytest.approx(0.1004, abs=1e-4)
    with pytest.raises(ValueError, match="k4"):
        common.kl_estimate(logprobs, REFERENCE, "k4")


@pytest.mark.parametrize("distance", [100.0, 1e5])
@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("sign", [1, -1])
def test_kl_estimates_stay_finite_however_far_the_reference_is(kind, distance, sign):
    logprobs = torch.tensor([0.0]).requires_grad_()
    value = common.kl_estimate(logprobs, torch.tensor([sign * distance]), kind)
    value.sum().backward()
    assert value.isfinite().all() and (value > 0).all()
    # Descent moves logp towards the reference: k2's gradient is d, k3's 1 - exp(-d).
    assert logprobs.grad.isfinite().all() and logprobs.grad.sign() == -sign


def test_rollout_weights_are_capped_detached_and_blind_to_what_is_masked():
    ratios = torch.tensor([[0.5, 1.0, 3.0, 1.0, 1.0, 1.0]]).log()
    old = torch.tensor([[-1.0, -1.0, -1.0, NAN, INF, -INF]]).requires_grad_()
    mask = torch.tensor([[True, True, True, False, False, False]])
    weights = common.rollout_correction(old, old.detach() - ratios, mask, cap=2.0)
    near(weights, [[0.5, 1.0, 2.0, 0.0, 0.0, 0.0]])
    assert not weights.requires_grad
    distant = torch.tensor([[-200.0, 200.0]])  # however far the engine is
    near(common.rollout_correction(distant * 0, distant, mask[:, :2], cap=2.0), [[2.0, 0.0]])


# ------------------------------------------ Sampling -----------------------------------------
@pytest.fixture
def prompts(tokenizer):
    return [common.encode_prompt(tokenizer, text) for text in ("1+1=?", "9+8-7+6=?", "2+3-1=?")]


def sample(model, prompts, seeds, temperature=1.0, max_tokens=12, stop_ids=(5,)):
    return common.sample(model, prompts, seeds, temperature, max_tokens, set(stop_ids))


def same(found, expected):
    """Whether two results have the same tokens, with log-probs equal but for rounding."""
    tokens = [ids for ids, _ in found] == [ids for ids, _ in expected]
    pairs = zip(found, expected, strict=True)
    return tokens and all(a == pytest.approx(b, abs=1e-4) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rows_samples_do_not_depend_on_the_rows_beside_it(tiny_model, prompts, temperature):
    rows, seeds = [prompt for prompt in prompts for _ in range(3)], list(range(9))
    together = sample(tiny_model, rows, seeds, temperature)
    if temperature:
        assert len({tuple(ids) for ids, _ in together[:3]}) > 1  # a seed is a sample of its own
    assert same(sample(tiny_model, rows[::-1], seeds[::-1], temperature)[::-1], together)
    for row in range(9):
        alone = sample(tiny_model, rows[row : row + 1], seeds[row : row + 1], temperature)
        assert same(alone, together[row : row + 1])
    repeated = sample(tiny_model, [prompts[0]] * 3, [7, 7, 7], temperature)
    assert same(repeated[1:], repeated[:1] * 2)
    assert sample(tiny_model, [], [], temperature) == []


def test_samples_do_not_depend_on_how_many_rows_fit_in_a_part(tiny_model, prompts, monkeypatch):
    # 32,768 positions a part: with 20,000 new tokens allowed, one row each. All tokens stop.
    everything = range(86)
    whole = sample(tiny_model, prompts, [1, 2, 3], max_tokens=1, stop_ids=everything)
    parts, original = [], common._sample
    monkeypatch.setattr(common, "_sample", lambda *a: parts.append(len(a[1])) or original(*a))
    for most, sizes in [(20_000, [1, 1, 1]), (40_000, [1, 1, 1]), (16_000, [2, 1])]:
        parts.clear()
        found = sample(tiny_model, prompts, [1, 2, 3], max_tokens=most, stop_ids=everything)
        assert same(found, whole) and parts == sizes


@pytest.mark.parametrize("stop_ids", [{5}, {5, 10, 11, 12}])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_completions_end_with_their_first_stop_token_and_have_the_trainers_logprobs(
    tiny_model, prompts, stop_ids, temperature
):
    found = sample(tiny_model, prompts * 8, range(24), temperature, stop_ids=stop_ids)
    completions, logprobs = zip(*found, strict=True)
    for ids in completions:
        assert not stop_ids & set(ids[:-1]) and (ids[-1] in stop_ids or len(ids) == 12)
    assert {ids[-1] in stop_ids for ids in completions} == {True, False}  # ended and cut ones
    input_ids, mask = common.collate(prompts * 8, completions, pad_id=0)
    expected, _ = common.token_logprobs(tiny_model, input_ids, mask, temperature)
    near(torch.tensor(sum(logprobs, [])), expected[mask], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_the_softmax_has_it(temperature):
    # 4,000 seeds in a row, two tokens each, of a vocabulary above generate's own top-k of 50. A
    # frequency is off by 5 of its standard deviations (p (1 - p) / n)^.5 once in two million.
    options, count, size = {"vocab_size": 60, "initializer_range": 0.2}, 4000, 60
    model = random_model("Llama", **options)
    found = sample(model, [[3, 4]] * count, range(count), temperature, max_tokens=2, stop_ids={1})
    with torch.no_grad():
        first = (model(torch.tensor([[3, 4]])).logits[0, -1].double() / temperature).softmax(0)
        pairs = torch.tensor([[3, 4, token] for token in range(size)])
        second = (model(pairs).logits[:, -1].double() / temperature).softmax(1)
    joint = torch.zeros(size, size, dtype=torch.float64)
    for ids, _ in found:
        joint[ids[0], ids[-1]] += 1 / count  # what stops at once is [1] and counted at (1, 1)
    second[1] = torch.nn.functional.one_hot(torch.tensor(1), size)
    for frequency, p in [(joint.sum(1), first), (joint.sum(0), first @ second)]:
        assert ((frequency - p).abs() <= 5 * (p * (1 - p) / count) ** 0.5).all()
        assert (frequency > 0).sum() > 50 and (p - 1 / size).abs().max() > 0.01
    p = first[:, None] * second  # and the second token with the first
    assert (joint - p).abs().sum() < 1.5 * (p * (1 - p) / count).sqrt().sum()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_checkpoints_sampling_settings_do_not_leak(tiny_model, prompts, temperature):
    expected = sample(tiny_model, prompts, range(3), temperature)
    settings = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "temperature": 0.1}
    settings |= {"eos_token_id": 7, "min_new_tokens": 11, "suppress_tokens": [10, 11, 12]}
    tiny_model.generation_config = transformers.GenerationConfig(**settings)
    assert same(sample(tiny_model, prompts, range(3), temperature), expected)
