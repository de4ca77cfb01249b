"""GRPO's advantage, loss, weights and update: values and gradients, against numbers by hand."""

import copy
import itertools
import json
import math

import pytest
import torch
from conftest import TINY, read_jsonl
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import common
import grpo

NAN, INF = math.nan, math.inf
AGGREGATIONS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]


# ------------------------------------------ Advantages ------------------------------------------
def test_advantages_are_deviations_from_the_group_in_its_standard_deviations():
    rewards = torch.tensor([[0.8, 0.3, 0.6, 0.5]])
    # Mean 0.55; population variance (0.0625 + 0.0625 + 0.0025 + 0.0025) / 4 = 0.0325.
    centred = torch.tensor([[0.25, -0.25, 0.05, -0.05]])
    torch.testing.assert_close(
        grpo.group_advantages(rewards), centred / 0.0325**0.5, rtol=0, atol=1e-5
    )
    rounded = torch.tensor([[1.387, -1.387, 0.277, -0.277]])
    torch.testing.assert_close(grpo.group_advantages(rewards), rounded, rtol=0, atol=5e-4)
    without_std = grpo.group_advantages(rewards, scale_by_std=False)
    torch.testing.assert_close(without_std, centred, rtol=0, atol=1e-6)


def test_each_prompt_is_compared_with_its_own_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [10.0, 10.0, 10.0, 0.0]])
    # Second group: mean 7.5, std sqrt(3 * 6.25 + 56.25) / 2 = 4.330, so 2.5 / 4.330 = 1 / sqrt(3).
    third = 3**-0.5
    expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [third, third, third, -3 * third]])
    torch.testing.assert_close(grpo.group_advantages(rewards), expected, rtol=0, atol=1e-5)


def test_the_scale_of_the_rewards_does_not_matter_with_the_std():
    binary = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    close = 0.9 + 0.1 * binary
    # p = 1/4: (1 - p) / sqrt(p (1 - p)) = sqrt(3), -p / sqrt(p (1 - p)) = -1 / sqrt(3).
    expected = torch.where(binary == 1, 3**0.5, -(3**-0.5))
    torch.testing.assert_close(grpo.group_advantages(binary), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(grpo.group_advantages(close), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 0.7, -1 / 3, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_a_uniform_group_is_exactly_zero(value, size, scale_by_std):
    # The float32 mean of ten times 0.1 is not 0.1, and the rest divided by eps would be large.
    rewards = torch.tensor([[value] * size, [0.0, 1.0] + [0.0] * (size - 2)])
    advantages = grpo.group_advantages(rewards, scale_by_std)
    assert advantages[0].tolist() == [0.0] * size
    assert (advantages[1] != 0).all()


# --------------------------------------------- Loss ---------------------------------------------
def loss_and_gradient(log_ratio, advantages, mask=None, **clip):
    """The loss, its gradient with respect to logprobs, and the clipped bool, of (B, T) inputs."""
    old = torch.full_like(log_ratio, -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    mask = torch.ones(log_ratio.shape, dtype=torch.bool) if mask is None else mask
    loss, clipped = grpo.policy_loss(logprobs, old, advantages, mask, **clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient, clipped


# (A, rho) -> loss, gradient, clipped: -min(rho A, clip(rho, 0.8, 1.2) A). Where rho A is chosen
# d(-rho A)/dlogp = -rho A; where the clip is, it is a constant.
PPO_CASES = [
    (1.0, 0.5, -0.5, -0.5, False),
    (1.0, 1.0, -1.0, -1.0, False),
    (1.0, 1.5, -1.2, 0.0, True),
    (-1.0, 0.5, 0.8, 0.0, True),
    (-1.0, 1.0, 1.0, 1.0, False),
    (-1.0, 1.5, 1.5, 1.5, False),
    (0.0, 1.5, 0.0, 0.0, False),
    (0.0, 0.5, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient", "clipped"), PPO_CASES)
def test_ppo_cases(advantage, ratio, loss, gradient, clipped):
    log_ratio = torch.tensor([[ratio]]).log()
    found = loss_and_gradient(log_ratio, torch.tensor([[advantage]]))
    assert found[0].item() == pytest.approx(loss, abs=1e-6)
    assert found[1].item() == pytest.approx(gradient, abs=1e-6)
    assert found[2].item() is clipped


def test_each_clip_flag_is_a_distance_from_1_on_its_own_side():
    # eps_low 0.1, eps_high 0.5: the ratio is clipped to [0.9, 1.5].
    log_ratio = torch.tensor([[1.4, 1.6, 0.95, 0.85]]).log()
    clip = {"clip_eps_low": 0.1, "clip_eps_high": 0.5}
    loss, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[1.0]]), **clip)
    torch.testing.assert_close(loss, torch.tensor([[-1.4, -1.5, -0.95, -0.85]]))
    torch.testing.assert_close(gradient, torch.tensor([[-1.4, 0.0, -0.95, -0.85]]))
    assert clipped.tolist() == [[False, True, False, False]]
    loss, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[-1.0]]), **clip)
    torch.testing.assert_close(loss, torch.tensor([[1.4, 1.6, 0.95, 0.9]]))
    torch.testing.assert_close(gradient, torch.tensor([[1.4, 1.6, 0.95, 0.0]]))
    assert clipped.tolist() == [[False, False, False, True]]


def test_the_ratio_is_each_tokens_own():
    # Two tokens that cancel in the sequence's mean log-ratio are still two ratios.
    log_ratio = torch.tensor([[2.0, 0.5]]).log()
    loss, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[1.0]]))
    torch.testing.assert_close(loss, torch.tensor([[-1.2, -0.5]]))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.5]]))
    assert clipped.tolist() == [[True, False]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_masked_changes_nothing(bad, where):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    inputs = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.0]]),
        "old_logprobs": torch.tensor([[-1.1, -1.8, -1.0], [-0.1, -1.6, -3.0]]),
        "advantages": torch.tensor([[1.0, -1.0, 2.0], [0.5, -2.0, 1.0]]),
    }

    def run(values):
        logprobs = values["logprobs"].clone().requires_grad_()
        loss, clipped = grpo.policy_loss(logprobs, *list(values.values())[1:], mask)
        (gradient,) = torch.autograd.grad(
            (loss * grpo.loss_weights(mask, "token-mean", 3)).sum(), logprobs
        )
        return loss.detach(), gradient, clipped

    expected = run(inputs)
    found = run({**inputs, where: torch.where(mask, inputs[where], bad)})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (
        (found[0][~mask] == 0).all() and (found[1][~mask] == 0).all() and not found[2][~mask].any()
    )


# ------------------------------------------ Aggregation -----------------------------------------
def lengths_mask(*lengths, width=0):
    """A mask with rows of `lengths` tokens, each after one masked column, padded to `width`."""
    columns = torch.arange(max(width, max(lengths) + 1))
    return (1 <= columns) & (columns <= torch.tensor(lengths)[:, None])


@pytest.mark.parametrize("padding", [0, 10])
@pytest.mark.parametrize(
    ("rows", "max_tokens", "values"),
    [
        # sums 14 and 19: 33 / 2; means 2.8 and 1.9; 33 / 15; 33 / (2 * 10)
        ([[1.0] * 4 + [10.0], [1.0] * 9 + [10.0]], 10, (16.5, 2.35, 2.2, 1.65)),
        # sums 3 and 3: 6 / 2; means 3 and 1; 6 / 4; 6 / (2 * 4)
        ([[3.0], [1.0, 1.0, 1.0]], 4, (3.0, 2.0, 1.5, 0.75)),
    ],
)
def test_aggregations(rows, max_tokens, values, padding):
    mask = lengths_mask(*map(len, rows), width=1 + max(map(len, rows)) + padding)
    flat = torch.tensor([value for row in rows for value in row])
    losses = torch.zeros(mask.shape).masked_scatter(mask, flat)
    for how, value in zip(AGGREGATIONS, values, strict=True):
        weights = grpo.loss_weights(mask, how, max_tokens)
        assert weights.shape == mask.shape and (weights[~mask] == 0).all()
        assert (losses * weights).sum().item() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_all_masked_is_a_loss_of_0_with_a_gradient_of_0(how):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    logprobs = torch.randn(2, 3, requires_grad=True)
    losses, _ = grpo.policy_loss(logprobs, torch.zeros(2, 3), torch.ones(2, 1), mask)
    loss = (losses * grpo.loss_weights(mask, how, 8)).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.tolist() == [[0.0] * 3] * 2


# -------------------------------- The estimator is the gradient ---------------------------------
def expected_gradients(policy, tables, completions, rewards, size, how, scale_by_std):
    """(GRPO's expected ascent direction over all groups of `size`, the expected reward's gradient).

    policy(completion) is the list of its tokens' log-probs, made of the parameters `tables`.
    """
    longest = max(map(len, completions))
    mask = torch.tensor([[t < len(c) for t in range(longest)] for c in completions])
    rows = [torch.stack(policy(c)) for c in completions]
    logprobs = torch.stack([torch.cat([r, r.new_full((longest - len(r),), NAN)]) for r in rows])
    probability = torch.stack([r.sum().exp() for r in rows])
    assert probability.sum().item() == pytest.approx(1.0, abs=1e-12)  # none is missing
    exact = torch.autograd.grad((probability * rewards).sum(), tables, retain_graph=True)

    groups = torch.tensor(list(itertools.product(range(len(completions)), repeat=size)))
    weight = probability.detach()[groups].prod(1)
    advantages = grpo.group_advantages(rewards[groups], scale_by_std)
    every = groups.flatten()
    losses, _ = grpo.policy_loss(
        logprobs[every], logprobs[every].detach(), advantages.view(-1, 1), mask[every]
    )
    weights = torch.cat([grpo.loss_weights(mask[group], how, longest) for group in groups])
    per_group = (losses * weights).view(len(groups), -1).sum(1)
    found = torch.autograd.grad((weight * per_group).sum(), tables)
    flat = [torch.cat([g.flatten() for g in gradients]) for gradients in (found, exact)]
    return -flat[0], flat[1]


@pytest.mark.parametrize("size", [2, 3])
def test_without_std_the_expected_gradient_is_that_of_the_expected_reward(size):
    # Two tokens of a vocabulary of 3, the second given the first; rewards of no pattern.
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    first = torch.randn(3, **options).requires_grad_()
    second = torch.randn(3, 3, **options).requires_grad_()
    rewards = torch.randn(9, **options)

    def policy(completion):
        a, b = completion
        return [first.log_softmax(0)[a], second[a].log_softmax(0)[b]]

    completions = list(itertools.product(range(3), repeat=2))
    found, exact = expected_gradients(
        policy, [first, second], completions, rewards, size, "sequence-sum", False
    )
    # A completion is in its own baseline, so (G-1)/G of its reward is left.
    torch.testing.assert_close(found, (size - 1) / size * exact, rtol=0, atol=1e-6)


def test_dividing_by_the_std_turns_the_expected_gradient():
    # Three arms at 1/3 with rewards 0, 1, 10. Gradient of the expected reward: p (R - mean R) =
    # (-11, -8, 19) / 9. In a group of two, (R - mean) / std is the sign of the difference: expected
    # advantages (-2/3, 0, 2/3), direction (-2, 0, 2) / 9. Cosine (11 + 19) / sqrt(2 * 546) = 0.908.
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1.0, 10.0], dtype=torch.float64)

    def policy(completion):
        return [logits.log_softmax(0)[completion[0]]]

    arms = [(0,), (1,), (2,)]
    found, exact = expected_gradients(policy, [logits], arms, rewards, 2, "sequence-sum", True)
    expected = torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64) / 9
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    cosine = torch.cosine_similarity(found, exact, dim=0).item()
    assert cosine == pytest.approx(30 / 1092**0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("how", "rewards", "direction"),
    [
        # Token 0 or 1 ends the completion, token 2 goes on for one more; all at 1/3. In a group of
        # two the expected advantage is a = (R - mean R) / 2, and the direction p (w a - mean w a)
        # with w the weight of the first token: 1, or 1/2 for the longer one in sequence-mean.
        # Wrong answers: a = (2, -1, -1) / 6. The longer one is pushed down 4/7 as much.
        ("sequence-sum", (1.0, 0.0, 0.0), (2 / 18, -1 / 18, -1 / 18)),
        ("sequence-mean", (1.0, 0.0, 0.0), (11 / 108, -7 / 108, -4 / 108)),
        # Right answers: a = (1, -2, 1) / 6. The longer one is pushed up 4/7 as much.
        ("sequence-sum", (1.0, 0.0, 1.0), (1 / 18, -2 / 18, 1 / 18)),
        ("sequence-mean", (1.0, 0.0, 1.0), (7 / 108, -11 / 108, 4 / 108)),
        # A constant divisor, here 2 tokens, has no such bias.
        ("constant", (1.0, 0.0, 0.0), (1 / 18, -1 / 36, -1 / 36)),
    ],
)
def test_the_mean_over_a_sequence_spares_long_wrong_answers(how, rewards, direction):
    first = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    second = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def policy(completion):
        at = [first.log_softmax(0)[completion[0]]]
        return at + [second.log_softmax(0)[token] for token in completion[1:]]

    completions = [(0,), (1,), (2, 0), (2, 1)]
    rewards = torch.tensor([*rewards, rewards[2]], dtype=torch.float64)
    found, _ = expected_gradients(policy, [first, second], completions, rewards, 2, how, False)
    expected = torch.tensor([*direction, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_two_armed_bandit():
    # Logits (1, 0): pi = (0.731, 0.269). Rewards 1 and 2: the expected reward's gradient is
    # pi_0 pi_1 (1 - 2) = -0.197 for the first logit. A group of 1000 with the arms as often as pi.
    logits = torch.tensor([1.0, 0.0], requires_grad=True)
    arms = torch.tensor([0] * 731 + [1] * 269)
    rewards = 1.0 + arms[None]
    logprobs = logits.log_softmax(0)[arms][:, None]
    mask = torch.ones(1000, 1, dtype=torch.bool)
    advantages = grpo.group_advantages(rewards, scale_by_std=False).view(-1, 1)
    losses, _ = grpo.policy_loss(logprobs, logprobs.detach(), advantages, mask)
    (losses * grpo.loss_weights(mask, "sequence-sum", 1)).sum().backward()
    assert (-logits.grad).tolist() == pytest.approx([-0.197, 0.197], abs=5e-4)


# -------------------------------------------- Updates -------------------------------------------
PROMPTS = ["1+2=?", "3+4-5=?", "7+8=?"]
COMPLETIONS = [
    ["#### 3", "1+2=3 #### 3", "#### 5", "#### 33"],
    ["3+4=7 7-5=2 #### 2", "#### 2", "#### 12", "3+4=7 #### 7"],
    ["#### 15", "7+8=15 #### 15", "#### 15", "15"],
]
REWARDS = [[1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]  # the last is uniform
UNIFORM = 4  # its rows
CPU = torch.device("cpu")


def make_args(**flags):
    """Args with no clipping of the gradient, and one update per batch unless said."""
    return grpo.Args(**{"max_grad_norm": 1e9, "max_completion_tokens": 32, **flags})


def make_batch(model, rewards=REWARDS, order=None, padding=0):
    """The batch of PROMPTS and COMPLETIONS, whose engine agrees with `model`."""
    tokenizer = common.load_tokenizer(TINY / "model")
    problems = [{"ids": common.encode_prompt(tokenizer, p)} for p in PROMPTS for _ in range(4)]
    ids = [tokenizer(c)["input_ids"] + [tokenizer.eos_token_id] for c in sum(COMPLETIONS, [])]
    empty = [[0.0] * len(row) for row in ids]
    batch = common.make_batch(problems, ids, empty, tokenizer.pad_token_id)
    with torch.no_grad():
        found = common.token_logprobs(model, batch["input_ids"], batch["mask"])
    batch["engine_logprobs"] = found[0]
    batch["advantages"] = grpo.group_advantages(torch.tensor(rewards)).view(-1, 1)
    if order:
        batch = {name: tensor[order] for name, tensor in batch.items()}
    if padding:
        batch = {
            name: tensor if name == "advantages" else torch.nn.functional.pad(tensor, (0, padding))
            for name, tensor in batch.items()
        }
    return batch


class Recorder:
    """An optimizer that changes nothing and keeps the gradient of each step, flat."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def step(self):
        self.gradients.append(torch.cat([w.grad.flatten() for w in self.model.parameters()]))

    def zero_grad(self):
        self.model.zero_grad()


def run_update(model, batch, optimizer=None, ref_model=None, **flags):
    """(metrics, gradient of the first step) of main's fourth step with these flags."""
    optimizer, args = optimizer or Recorder(model), make_args(**flags)
    autocast, totals = common.precision("float32", CPU)[1], common.Totals()
    batch["trained"] = (batch["advantages"] != 0) | (args.beta > 0)
    if args.minibatches * args.update_epochs > 1:
        batch["old_logprobs"] = common.batch_logprobs(model, batch, args, autocast)
    if ref_model:
        batch["ref_logprobs"] = common.batch_logprobs(ref_model, batch, args, autocast)
    for rows in common.minibatches(len(batch["mask"]), args.minibatches, args.update_epochs, 0):
        grpo.update(model, optimizer, batch, rows, args, autocast, totals)
    return totals.metrics(), optimizer.gradients[0] if isinstance(optimizer, Recorder) else None


def plain_logprobs(model, batch):
    """Log-probs of the vocabulary (B, T-1, V) and of the tokens (B, T-1), by the plain forward."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
    return logits, logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]


def other_model(model):
    """A copy of a model with somewhat different weights."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return other


def near(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_gradient_is_the_formulas_over_all_rows(tiny_model):
    # The whole batch in one plain forward pass, uniform rows included, at ratio 1:
    # the gradient of -mean over sequences of mean over tokens of A logp.
    batch = make_batch(tiny_model)
    _, logprobs = plain_logprobs(tiny_model, batch)
    mask = batch["mask"]
    means = (logprobs * mask).sum(1) / mask.sum(1)
    (-(batch["advantages"][:, 0] * means).mean()).backward()
    expected = torch.cat([w.grad.flatten() for w in tiny_model.parameters()])
    tiny_model.zero_grad()
    assert expected.norm() > 0.1  # or the comparison would say little
    near(run_update(tiny_model, batch)[1], expected)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_neither_micro_batches_nor_padding_nor_the_order_change_the_gradient(tiny_model, how):
    options = {"loss_aggregation": how}
    metrics, gradient = run_update(tiny_model, make_batch(tiny_model), **options)
    order = [7, 2, 11, 0, 5, 8, 3, 10, 1, 6, 9, 4]
    for batch, budget in [
        (make_batch(tiny_model), 1),  # a row to each micro-batch
        (make_batch(tiny_model), 60),
        (make_batch(tiny_model, padding=10), 16384),
        (make_batch(tiny_model, order=order), 60),
    ]:
        # With "sequence-sum" the gradient is as many times longer as a completion has tokens.
        found = run_update(tiny_model, batch, tokens_per_micro_batch=budget, **options)
        near(found[1] / gradient.norm(), gradient / gradient.norm())
        for name in ("loss/policy", "policy/entropy", "policy/clip_frac", "engine/mismatch"):
            assert found[0][name] == pytest.approx(metrics[name], abs=1e-6)


def test_the_old_policy_is_the_current_one_where_it_is_not_given(tiny_model):
    batch = make_batch(tiny_model)
    given = {**make_batch(tiny_model), "old_logprobs": batch["engine_logprobs"]}
    near(run_update(tiny_model, batch)[1], run_update(tiny_model, given)[1])


def record_ratios(monkeypatch):
    """A list that gets the ratios of each micro-batch, those of its tokens."""
    ratios, original = [], grpo.policy_loss

    def recording(logprobs, old_logprobs, advantages, mask, *clip):
        ratios.append((logprobs - old_logprobs)[mask].exp().detach())
        return original(logprobs, old_logprobs, advantages, mask, *clip)

    monkeypatch.setattr(grpo, "policy_loss", recording)
    return ratios


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.4, 1.0, 0.0), (1.6, 1.0, 1.0), (0.95, -1.0, 0.0), (0.85, -1.0, 1.0)],
)
def test_the_clip_flags_reach_the_loss_each_on_its_side(tiny_model, ratio, advantage, clipped):
    batch = make_batch(tiny_model)
    batch["old_logprobs"] = batch["engine_logprobs"] = batch["engine_logprobs"] - math.log(ratio)
    batch["advantages"] = torch.full((12, 1), advantage)
    metrics, gradient = run_update(tiny_model, batch, clip_eps_low=0.1, clip_eps_high=0.5)
    assert metrics["policy/clip_frac"] == clipped
    assert (gradient.norm() == 0).item() is bool(clipped)


def test_each_row_is_in_one_minibatch_of_each_epoch(tiny_model, monkeypatch):
    # With sequence-sum and two halves, each half's gradient is of a mean over half as many rows:
    # their mean is the whole's, and a row left out or taken twice would show.
    options = {"loss_aggregation": "sequence-sum"}
    _, whole = run_update(tiny_model, make_batch(tiny_model), **options)
    recorder = Recorder(tiny_model)
    halves = {"minibatches": 2, "update_epochs": 2}
    run_update(tiny_model, make_batch(tiny_model), recorder, **halves, **options)
    a, b, c, d = recorder.gradients
    near((a + b) / 2 / whole.norm(), whole / whole.norm())
    near((c + d) / 2 / whole.norm(), whole / whole.norm())
    assert (a - b).norm() > 0.1 * whole.norm()
    assert min((a - c).norm(), (a - d).norm()) > 0.1 * whole.norm()  # shuffled anew


@pytest.mark.parametrize("minibatches", [1, 2])
def test_nothing_to_learn_from_is_a_step_that_changes_nothing(tiny_model, minibatches):
    batch = make_batch(tiny_model, rewards=[[1.0] * 4, [0.0] * 4, [0.1] * 4])
    before = copy.deepcopy(tiny_model.state_dict())
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=0.1, weight_decay=0.0)
    metrics, _ = run_update(tiny_model, batch, optimizer, minibatches=minibatches)
    assert metrics["policy/grad_norm"] == 0.0 and metrics["loss/policy"] == 0.0
    assert metrics["policy/entropy"] is None and metrics["policy/clip_frac"] is None
    for name, weight in tiny_model.state_dict().items():
        assert torch.equal(weight, before[name])


# ---------------------------------- The KL to the reference model ---------------------------------
@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_beta_adds_the_mean_kl_once(tiny_model, kind):
    reference, options = other_model(tiny_model), {"loss_aggregation": "token-mean"}
    batch = make_batch(tiny_model)
    with torch.no_grad():
        d = plain_logprobs(tiny_model, batch)[1] - plain_logprobs(reference, batch)[1]
    terms = d**2 / 2 if kind == "k2" else torch.exp(-d) - 1 + d
    kl = terms[batch["mask"]].mean().item()  # over all tokens: those of the uniform group too
    assert kl > 1e-3
    without, _ = run_update(tiny_model, make_batch(tiny_model), **options)
    options |= {"beta": 0.1, "kl_estimator": kind}
    metrics, _ = run_update(tiny_model, batch, ref_model=reference, **options)
    assert metrics["kl/mean"] == pytest.approx(kl, rel=1e-4)
    difference = metrics["loss/policy"] - without["loss/policy"]
    assert difference == pytest.approx(0.1 * kl, rel=1e-4)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_a_step_on_the_kl_alone_lowers_it(tiny_model, tokenizer, kind):
    reference = other_model(tiny_model)
    before = copy.deepcopy(reference.state_dict())
    # The estimators are those of samples of the policy: 64 completions of each prompt.
    args = make_args(model=str(TINY / "model"))
    stops, pad = {tokenizer.eos_token_id}, tokenizer.pad_token_id
    engine = common.TransformersEngine(args, stops, pad, CPU, torch.float32)
    prompts = [common.encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    rollouts = engine.generate(prompts, 64, 1.0, 32, seed=0)
    problems = [{"ids": ids} for ids in prompts for _ in range(64)]
    batch = common.make_batch(problems, *rollouts, pad)
    batch["advantages"] = torch.zeros(3 * 64, 1)

    @torch.no_grad()
    def divergence():
        """KL(pi || ref) summed over the vocabulary, at the batch's positions."""
        ours, theirs = plain_logprobs(tiny_model, batch)[0], plain_logprobs(reference, batch)[0]
        return (ours.exp() * (ours - theirs)).sum(-1)[batch["mask"]].mean().item()

    start = divergence()
    optimizer = torch.optim.SGD(tiny_model.parameters(), lr=0.01)
    options = {"beta": 1.0, "kl_estimator": kind, "max_grad_norm": 1.0}
    run_update(tiny_model, batch, optimizer, reference, **options)
    assert divergence() < 0.99 * start
    assert all(torch.equal(w, before[name]) for name, w in reference.state_dict().items())


# ------------------------------------ Precision, dropout, memory ----------------------------------
def test_a_step_of_1e_6_moves_the_weights_of_a_bfloat16_checkpoint(tiny_model, tmp_path):
    # Adam's first step is the learning rate for each weight, which bfloat16 would round away.
    tiny_model.to(torch.bfloat16).save_pretrained(tmp_path)
    model = common.load_model(AutoModelForCausalLM, tmp_path, CPU)
    before = [weight.detach().clone() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    run_update(model, make_batch(model), optimizer)
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.dtype == torch.float32
        assert (new != old).float().mean() > 0.9
        assert (new - old).abs().max() < 2e-6


def test_a_model_with_dropout_has_the_ratio_1(tmp_path, monkeypatch):
    size = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 86, "n_positions": 64}
    drop = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**size, **drop)).save_pretrained(tmp_path)
    # Checkpointing needs the training mode, in which a dropout would be active.
    model = common.load_model(AutoModelForCausalLM, tmp_path, CPU, gradient_checkpointing=True)
    ratios = record_ratios(monkeypatch)
    metrics, _ = run_update(model, make_batch(model), minibatches=2, tokens_per_micro_batch=60)
    assert (torch.cat(ratios) - 1).abs().max() < 1e-6
    assert metrics["policy/grad_norm"] > 0


def test_gradient_checkpointing_changes_no_gradient():
    found = []
    for checkpointing in (False, True):
        model = common.load_model(AutoModelForCausalLM, TINY / "model", CPU, checkpointing)
        assert model.is_gradient_checkpointing is checkpointing
        found.append(run_update(model, make_batch(model))[1])
    near(*found)


# ---------------------------------- The engine's probabilities -----------------------------------
@pytest.mark.parametrize(
    ("shift", "cap", "factor"),
    [
        (-0.1, 2.0, math.exp(0.1)),  # the trainer finds the samples e^0.1 times as likely
        (0.1, 2.0, math.exp(-0.1)),
        (-5.0, 2.0, 2.0),
        (-5.0, 3.0, 3.0),
        (-5.0, 0.0, 1.0),  # no weights
    ],
)
def test_the_weights_of_the_engines_samples(tiny_model, shift, cap, factor):
    advantages = torch.linspace(0.5, 1.5, 12)[:, None]  # not centred: the loss is not 0
    plain = {**make_batch(tiny_model), "advantages": advantages}
    metrics, gradient = run_update(tiny_model, plain)
    shifted = {**make_batch(tiny_model), "advantages": advantages}
    shifted["engine_logprobs"] = shifted["engine_logprobs"] + shift
    found = run_update(tiny_model, shifted, mismatch_cap=cap)
    assert metrics["loss/policy"] == pytest.approx(-1.0, abs=1e-5)  # minus the mean advantage
    assert found[0]["loss/policy"] == pytest.approx(-factor, abs=1e-5)
    near(found[1] / gradient.norm(), factor * gradient / gradient.norm())
    assert found[0]["engine/mismatch"] == pytest.approx(abs(shift), abs=1e-5)
    assert found[0]["engine/mismatch_max"] == pytest.approx(abs(shift), abs=1e-5)


# -------------------------------------- A step of the script -------------------------------------
def run_main(tmp_path, monkeypatch, **flags):
    """One step of main on two prompts, a group of four each, of which the second is uniform."""
    rows = [{"prompt": "1+2=?", "answer": "mixed"}, {"prompt": "3+4=?", "answer": "uniform"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = itertools.cycle([0.0, 1.0])
    monkeypatch.setattr(
        grpo, "reward", lambda prompt, text, answer: next(scores) if answer == "mixed" else 0.1
    )
    monkeypatch.setattr(common, "catch_signals", list)  # pytest keeps its own
    data = {"model": str(TINY / "model"), "dataset": str(tmp_path / "data.jsonl")}
    data |= {"eval_dataset": data["dataset"], "output_dir": str(tmp_path / "run")}
    size = {"steps": 1, "prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 32}
    machine = {"rollout_engine": "transformers", "dtype": "float32", "warmup_steps": 0}
    grpo.main(grpo.Args(**data, **size, **machine, **flags))
    return read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ({}, 4),  # one pass over the mixed group, and none for the old policy
        ({"update_epochs": 2}, 3 * 4),  # the old policy's pass, and one for each update
        ({"minibatches": 2}, 2 * 4),
        ({"beta": 0.1}, 2 * 8),  # the KL has a gradient in both groups: the reference's pass too
    ],
)
def test_what_has_no_gradient_costs_no_pass(tmp_path, monkeypatch, flags, rows):
    scored, original = [], common.token_logprobs

    def counting(model, ids, mask, *rest):
        scored.append(int(mask.any(1).sum()))
        return original(model, ids, mask, *rest)

    monkeypatch.setattr(common, "token_logprobs", counting)
    row = run_main(tmp_path, monkeypatch, **flags)
    assert sum(scored) == rows
    assert row["reward/uniform_groups"] == 0.5
    assert row["policy/grad_norm"] > 0
    assert ("kl/mean" in row) is ("beta" in flags)


def test_the_ratio_is_1_in_the_first_update_and_moves_in_the_second(tmp_path, monkeypatch):
    ratios = record_ratios(monkeypatch)
    run_main(tmp_path, monkeypatch, update_epochs=2, learning_rate=1e-3)
    first, second = ratios
    assert (first - 1).abs().max() < 1e-6
    assert (second - 1).abs().max() > 0.01
