"""REINFORCE's returns, loss and baselines: values and gradients, by hand and by enumeration."""

import math

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import reinforce


@pytest.mark.parametrize(
    "rewards, gamma, returns",
    [
        ([0.0, 0.0, 3.0], 1.0, [3.0, 3.0, 3.0]),  # one reward at the end: R everywhere
        ([0.0, 0.0, 1.0], 0.5, [0.25, 0.5, 1.0]),
        ([1.0, 0.0, 2.0], 1.0, [3.0, 2.0, 2.0]),  # what came before a token is not its doing
        ([1.0, 0.0, 2.0], 0.5, [1.5, 1.0, 2.0]),  # 1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2
        ([0.0, 1.0, 0.0], 0.5, [0.5, 1.0, 0.0]),  # nothing leaks back from a later column
    ],
)
def test_returns_to_go(rewards, gamma, returns):
    other = [0.0, 5.0, 0.0]  # another row changes nothing
    found = reinforce.returns_to_go(torch.tensor([rewards, other]), gamma)
    near(found, [returns, [5.0 * gamma, 5.0, 0.0]])
    if gamma == 1:
        near(reinforce.returns_to_go(torch.tensor([rewards])), [returns])


# The two-armed bandit. Logits (1, 0): p, q = sigmoid(1), sigmoid(-1) = 0.731, 0.269; arm 0 pays 1,
# arm 1 pays 2. d log pi(0) / d logits = (q, -q) and d log pi(1) / d logits = (-p, p).
P, Q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))


@pytest.mark.parametrize(
    "baseline, samples, variance",
    [
        # E[R] = p + 2 q: the exact gradient is p q (1 - 2). Variance p q^2 + q (2 p)^2 - (p q)^2.
        (0.0, [0.269, -1.462], 0.589),
        # b = E[R] = 1 + q: the samples are (1 - b) q = -q^2 and (2 - b) (-p) = -p^2, of the mean
        # -p q^2 - q p^2 = -p q and the variance p q^4 + q p^4 - (p q)^2 = p q (p - q)^2.
        (1 + Q, [-0.0723, -0.5345], 0.042),
    ],
)
def test_a_baseline_leaves_the_bandits_mean_and_lowers_its_variance(baseline, samples, variance):
    gradients = []  # of the objective, from a sample of each arm: minus that of the loss
    for arm, reward in enumerate((1.0, 2.0)):
        logits = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
        logprobs = logits.log_softmax(0)[None, [arm]]
        loss = reinforce.policy_loss(logprobs, torch.tensor([[reward - baseline]]))
        (loss * reinforce.loss_weights(torch.tensor([[True]]), "sequence-sum", 1)).sum().backward()
        gradients.append(-logits.grad)
    near(torch.stack(gradients), [[s, -s] for s in samples], atol=5e-4)
    p, first = torch.tensor([P, Q], dtype=torch.float64), torch.stack(gradients)[:, 0]
    mean = (p * first).sum()
    assert mean.item() == pytest.approx(-P * Q, abs=1e-6) == pytest.approx(-0.197, abs=5e-4)
    assert (p * first**2).sum() - mean**2 == pytest.approx(variance, abs=5e-4)
    assert baseline or 0.589**0.5 == pytest.approx(0.77, abs=5e-3)


def batch_loss(policy, advantages, rows):
    """The loss of a batch of the toy policy's completions, as update() sums it."""
    losses = reinforce.policy_loss(policy.logprobs()[rows], advantages)
    return (losses * reinforce.loss_weights(policy.mask[rows], "sequence-sum", 2)).sum()


@pytest.mark.parametrize("completions", [STOPPING, FIXED])
@pytest.mark.parametrize("baseline", [0.0, 1.7])  # none, and what past batches left
def test_with_a_constant_baseline_the_expected_gradient_is_exact(completions, baseline):
    policy = Policy(completions)
    assert policy.probabilities().sum().item() == pytest.approx(1.0, abs=1e-12)  # none is missing
    assert policy.exact_gradient().norm() > 0.1

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
    firsts = torch.tensor([[2.0, -1.0, 0.5][c[0]] for c in policy.completions])
    rewards = torch.stack([firsts.double(), policy.rewards * policy.mask[:, 1]], 1)
    returns = reinforce.returns_to_go(rewards)
    found = policy.expected_gradient(lambda rows: batch_loss(policy, returns[rows], rows), 1)
    near(found, policy.exact_gradient(rewards.sum(1)))
