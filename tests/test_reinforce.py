"""REINFORCE's returns, loss and baselines: values and gradients, by hand and by enumeration."""

import math

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

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
    near(found, [returns, [5.0 * gamma, 5.0, 0.0]])


def test_returns_are_not_discounted_by_default():
    near(reinforce.returns_to_go(torch.tensor([[1.0, 0.0, 2.0]])), [[3.0, 2.0, 2.0]])
    assert reinforce.Args().gamma == 1.0


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
    near(bandit_gradients(), [[Q, -Q], [-2 * P, 2 * P]])
    near(bandit_gradients(), [[0.269, -0.269], [-1.462, 1.462]], atol=5e-4)


def test_the_bandits_mean_is_exact_and_its_variance_large():
    # E[R] = p + 2 q, so the gradient is p q (1 - 2) = -0.197 for the first logit.
    mean, variance = moments(bandit_gradients())
    near(mean, [-P * Q, P * Q])
    near(mean, [-0.197, 0.197], atol=5e-4)
    # p q^2 + q (2 p)^2 - (p q)^2
    assert variance.item() == pytest.approx(0.589, abs=5e-4)
    assert variance.item() ** 0.5 == pytest.approx(0.77, abs=5e-3)


def test_a_baseline_leaves_the_bandits_mean_and_lowers_its_variance():
    # b = E[R] = 1 + q = 1.269: the samples are (1 - b) q = -q^2 and (2 - b) (-p) = -p^2.
    # Mean -p q^2 - q p^2 = -p q. Variance p q^4 + q p^4 - (p q)^2 = p q (p - q)^2 = 0.042.
    mean, variance = moments(bandit_gradients(baseline=1 + Q))
    near(mean, [-P * Q, P * Q])
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

    assert policy.exact_gradient().norm() > 0.1
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
    by_first = torch.tensor([2.0, -1.0, 0.5], dtype=DOUBLE)
    firsts = torch.stack([by_first[c[0]] for c in policy.completions])
    rewards = torch.stack([firsts, policy.rewards * policy.mask[:, 1]], 1)
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
