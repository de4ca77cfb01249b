"""REINFORCE's returns, loss and baselines: values and gradients, by hand and by enumeration."""

import math

import pytest
import torch
from toy import (
    FIXED,
    STOPPING,
    Policy,
    flat_gradient,
    gradient_of_update,
    initial_model,
    make_batch,
    near,
    plain_logprobs,
    run_main,
)

import reinforce

DOUBLE = torch.float64


# ------------------------------------------- Returns --------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "gamma", "returns"),
    [
        ([0.0, 0.0, 3.0], 1.0, [3.0, 3.0, 3.0]),  # one reward at the end: R everywhere
        ([0.0, 0.0, 1.0], 0.5, [0.25, 0.5, 1.0]),
        ([1.0, 0.0, 2.0], 1.0, [3.0, 2.0, 2.0]),  # what came before a token is not its doing
        ([1.0, 0.0, 2.0], 0.5, [1.5, 1.0, 2.0]),  # 1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2
        ([1.0, -1.0, 2.0], 0.0, [1.0, -1.0, 2.0]),
        ([0.0, 1.0, 0.0], 0.5, [0.5, 1.0, 0.0]),  # nothing leaks back from a later column
    ],
)
def test_returns_to_go(rewards, gamma, returns):
    other = [0.0, 5.0, 0.0]  # another row changes nothing
    found = reinforce.returns_to_go(torch.tensor([rewards, other]), gamma)
    near(found, torch.tensor([returns, [5.0 * gamma, 5.0, 0.0]]))


# ------------------------------------- The two-armed bandit -------------------------------------
# Logits (1, 0): p, q = sigmoid(1), sigmoid(-1) = 0.731, 0.269; arm 0 pays 1, arm 1 pays 2.
# d log pi(0) / d logits = (q, -q) and d log pi(1) / d logits = (-p, p).
P = 1 / (1 + math.exp(-1))
Q = 1 - P


def bandit_gradients(baseline=0.0):
    """The objective's gradient (2, 2) from a sample of each arm: minus that of the loss."""
    gradients = []
    for arm, reward in enumerate((1.0, 2.0)):
        logits = torch.tensor([1.0, 0.0], dtype=DOUBLE, requires_grad=True)
        logprobs = logits.log_softmax(0)[None, [arm]]
        loss = reinforce.policy_loss(logprobs, torch.tensor([[reward - baseline]]))
        (loss * reinforce.loss_weights(torch.tensor([[True]]), "sequence-sum", 1)).sum().backward()
        gradients.append(-logits.grad)
    return torch.stack(gradients)


def moments(gradients):
    """(mean, variance of the first component) over the two arms."""
    p = torch.tensor([[P], [Q]], dtype=DOUBLE)
    mean = (p * gradients).sum(0)
    return mean, (p * gradients**2).sum(0)[0] - mean[0] ** 2


def test_the_bandits_gradients_of_one_sample():
    near(bandit_gradients(), torch.tensor([[Q, -Q], [-2 * P, 2 * P]], dtype=DOUBLE))
    rounded = torch.tensor([[0.269, -0.269], [-1.462, 1.462]], dtype=DOUBLE)
    near(bandit_gradients(), rounded, atol=5e-4)


def test_the_bandits_mean_is_exact_and_its_variance_large():
    # E[R] = p + 2 q, so the gradient is p q (1 - 2) = -0.197 for the first logit.
    mean, variance = moments(bandit_gradients())
    near(mean, torch.tensor([-P * Q, P * Q], dtype=DOUBLE))
    near(mean, torch.tensor([-0.197, 0.197], dtype=DOUBLE), atol=5e-4)
    # p q^2 + q (2 p)^2 - (p q)^2
    assert variance.item() == pytest.approx(0.589, abs=5e-4)
    assert variance.item() ** 0.5 == pytest.approx(0.77, abs=5e-3)


def test_a_baseline_leaves_the_bandits_mean_and_lowers_its_variance():
    # b = E[R] = 1 + q = 1.269: the samples are (1 - b) q = -q^2 and (2 - b) (-p) = -p^2.
    # Mean -p q^2 - q p^2 = -p q. Variance p q^4 + q p^4 - (p q)^2 = p q (p - q)^2 = 0.042.
    mean, variance = moments(bandit_gradients(baseline=1 + Q))
    near(mean, torch.tensor([-P * Q, P * Q], dtype=DOUBLE))
    assert variance.item() == pytest.approx(P * Q * (P - Q) ** 2, abs=1e-6)
    assert variance.item() == pytest.approx(0.042, abs=5e-4)


# -------------------------------- The estimator is the gradient ---------------------------------
def batch_loss(policy, advantages, rows):
    """The loss of a batch of the toy policy's completions, as update() sums it."""
    losses = reinforce.policy_loss(policy.logprobs()[rows], advantages)
    return (losses * reinforce.loss_weights(policy.mask[rows], "sequence-sum", 2)).sum()


@pytest.mark.parametrize("completions", [STOPPING, FIXED])
@pytest.mark.parametrize("baseline", [0.0, 1.7])  # none, and what past batches left
def test_with_a_constant_baseline_the_expected_gradient_is_exact(completions, baseline):
    policy = Policy(completions)
    assert policy.probabilities().sum().item() == pytest.approx(1.0, abs=1e-12)  # none is missing

    def loss(rows):
        return batch_loss(policy, policy.rewards[rows][:, None] - baseline, rows)

    for size in (1, 2):
        near(policy.expected_gradient(loss, size), policy.exact_gradient())


@pytest.mark.parametrize("size", [2, 3])
def test_the_batch_mean_shrinks_the_expected_gradient(size):
    # A completion's own reward is 1 / B of its baseline, and cancels 1 / B of its gradient.
    policy = Policy()

    def loss(rows):
        rewards = policy.rewards[rows]
        return batch_loss(policy, (rewards - rewards.mean())[:, None], rows)

    found = policy.expected_gradient(loss, size)
    near(found, (size - 1) / size * policy.exact_gradient())


def test_return_to_go_of_rewards_per_token_has_the_exact_gradient():
    policy = Policy()
    # What a token earns is known once it is there: the first reward depends on the first alone.
    by_first = torch.tensor([2.0, -1.0, 0.5])
    firsts = [by_first[c[0]] for c in policy.completions]
    rewards = torch.stack([torch.stack(firsts).double(), policy.rewards * policy.mask[:, 1]], 1)
    returns = reinforce.returns_to_go(rewards)
    found = policy.expected_gradient(lambda rows: batch_loss(policy, returns[rows], rows), 1)
    near(found, policy.exact_gradient(rewards.sum(1)))


def test_return_to_go_has_less_variance_than_the_whole_reward():
    # Two tokens, each uniform over three; the first earns 3 if it is token 1, the second nothing.
    policy = Policy(FIXED)
    for table in policy.tables:
        table.detach().zero_()
    rewards = torch.tensor([[3.0 * (a == 1), 0.0] for a, _ in FIXED], dtype=DOUBLE)
    whole = rewards.sum(1, keepdim=True).expand(-1, 2)

    def mean_and_variance(weights):
        samples = [
            -policy.gradient(batch_loss(policy, weights[[row]], torch.tensor([row])))
            for row in range(len(FIXED))
        ]
        mean = torch.stack(samples).mean(0)
        return mean, (torch.stack(samples) - mean).pow(2).sum(1).mean().item()

    mean, variance = mean_and_variance(reinforce.returns_to_go(rewards))
    mean_of_whole, variance_of_whole = mean_and_variance(whole)
    near(mean, mean_of_whole)
    # The whole reward adds R (1_b - 1/3) at the second token, of mean 0 and of variance
    # E[R^2] E|1_b - 1/3|^2 = 3 * 2/3 = 2.
    assert variance_of_whole - variance == pytest.approx(2.0, abs=1e-9)


# -------------------------------------- The loss of a batch -------------------------------------
def test_the_loss_is_summed_over_tokens_and_averaged_over_completions():
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    logprobs = torch.full((2, 4), -2.0).requires_grad_()
    losses = reinforce.policy_loss(logprobs, torch.tensor([[3.0], [5.0]]))
    loss = (losses * reinforce.loss_weights(mask, reinforce.Args().loss_aggregation, 8)).sum()
    loss.backward()
    assert loss.item() == pytest.approx((3 * 3 * 2.0 + 5 * 2.0) / 2)
    # -A / B for each token, however many there are
    assert logprobs.grad.tolist() == [[0.0, -1.5, -1.5, -1.5], [0.0, -2.5, 0.0, 0.0]]


def test_the_gradient_of_an_update_is_the_formulas(tiny_model, tokenizer):
    batch = make_batch(tiny_model, tokenizer)
    loss = -(batch["advantages"] * plain_logprobs(tiny_model, batch)).sum(1).mean()
    expected = flat_gradient(tiny_model, loss)
    found = gradient_of_update(reinforce, tiny_model, batch)
    near(found / expected.norm(), expected / expected.norm())


# ----------------------------------- The baselines, in a run ------------------------------------
def assert_advantages(step, baseline):
    """Each token of a completion has its reward less the baseline, and padding has 0."""
    assert step.rewards.std() > 0.1  # or the comparison would say little
    expected = (step.rewards[:, None] - baseline) * step.batch["mask"]
    near(step.batch["advantages"], expected)


def test_no_baseline(tmp_path, monkeypatch):
    (step,), _ = run_main(reinforce, tmp_path, monkeypatch, baseline="none")
    assert_advantages(step, 0.0)


def test_the_batch_mean_is_over_all_prompts(tmp_path, monkeypatch):
    (step,), _ = run_main(reinforce, tmp_path, monkeypatch, baseline="batch-mean")
    assert_advantages(step, step.rewards.mean())


FLAGS = {"baseline": "moving-average", "baseline_decay": 0.75}


def test_the_moving_average_is_of_the_batches_before(tmp_path, monkeypatch):
    steps, _ = run_main(reinforce, tmp_path, monkeypatch, steps=3, **FLAGS)
    means = [step.rewards.mean() for step in steps]
    assert abs(means[0] - means[1]) > 1e-3
    for step, baseline in zip(
        steps, [0.0, means[0], 0.75 * means[0] + 0.25 * means[1]], strict=True
    ):
        assert_advantages(step, baseline)


def test_the_moving_average_goes_on_after_a_resume(tmp_path, monkeypatch):
    flags = {**FLAGS, "save_every": 1}
    before, _ = run_main(reinforce, tmp_path, monkeypatch, steps=2, **flags)
    resumed = {**flags, "steps": 3, "resume": str(tmp_path / "run")}
    (step,), _ = run_main(reinforce, tmp_path, monkeypatch, **resumed)
    means = [step.rewards.mean() for step in before]
    assert_advantages(step, 0.75 * means[0] + 0.25 * means[1])


def test_the_reward_is_discounted_back_from_the_last_token(tmp_path, monkeypatch):
    (step,), _ = run_main(reinforce, tmp_path, monkeypatch, baseline="none", gamma=0.5)
    mask = step.batch["mask"]
    left = mask.flip(1).cumsum(1).flip(1) - 1  # tokens after this one
    near(step.batch["advantages"], step.rewards[:, None] * 0.5**left * mask)


def test_the_kl_is_paid_at_the_token_that_causes_it(tmp_path, monkeypatch):
    flags = {"steps": 2, "baseline": "none", "beta": 0.5, "learning_rate": 3e-3}
    (_, step), rows = run_main(reinforce, tmp_path, monkeypatch, **flags)
    with torch.no_grad():  # k1 = logp - ref_logp, of the policy before its second update
        k1 = plain_logprobs(step.models[0], step.batch) - plain_logprobs(
            initial_model(), step.batch
        )
    assert k1.abs().mean() > 1e-3
    to_go = k1.flip(1).cumsum(1).flip(1)
    mask = step.batch["mask"]
    near(step.batch["advantages"], (step.rewards[:, None] - 0.5 * to_go) * mask, atol=1e-4)
    assert rows[-1]["kl/mean"] == pytest.approx(k1[mask].mean().item(), abs=1e-5)
    assert rows[-1]["reward/mean"] == pytest.approx(step.rewards.mean().item(), abs=1e-6)


def test_the_kl_is_in_the_baseline_too(tmp_path, monkeypatch):
    # Else the mean advantage would drift off 0 as the policy leaves its reference.
    flags = {"steps": 2, "baseline": "batch-mean", "beta": 0.5, "learning_rate": 3e-3}
    (_, step), _ = run_main(reinforce, tmp_path, monkeypatch, **flags)
    first = step.batch["mask"].int().argmax(1, keepdim=True)
    advantages = step.batch["advantages"].gather(1, first)  # of the whole completions
    assert advantages.std() > 0.1
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-5)
