"""REINFORCE's returns, loss and baselines: values and gradients, by hand and by enumeration."""

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import reinforce


def test_returns_to_go():
    # One reward at the end; one before, which is not a later token's doing; one that leaks nowhere.
    rewards = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    near(reinforce.returns_to_go(rewards), [[1, 1, 1], [3, 2, 2], [1, 1, 0]])
    # 1 / 4, 1 / 2, 1; 1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2; 1 / 2, 1, 0.
    near(reinforce.returns_to_go(rewards, 0.5), [[0.25, 0.5, 1], [1.5, 1, 2], [0.5, 1, 0]])


@pytest.mark.parametrize("completions", [STOPPING, FIXED])
@pytest.mark.parametrize("baseline", [0.0, 1.7, "batch-mean"])  # 1.7: what past batches left
@pytest.mark.parametrize("size", [1, 2])
def test_the_expected_gradient_is_that_of_the_expected_reward(completions, baseline, size):
    policy = Policy(completions)
    assert policy.probabilities().sum().item() == pytest.approx(1.0, abs=1e-12)  # none is missing
    assert policy.exact_gradient().norm() > 0.1

    def loss(rows):
        rewards = policy.rewards[rows][:, None]
        b = rewards.mean() if baseline == "batch-mean" else baseline
        losses = reinforce.policy_loss(policy.logprobs()[rows], rewards - b)
        return (losses * reinforce.loss_weights(policy.mask[rows], "sequence-sum", 2)).sum()

    # A completion's own reward is 1 / B of the batch's mean, and cancels 1 / B of its gradient.
    left = (size - 1) / size if baseline == "batch-mean" else 1
    near(policy.expected_gradient(loss, size), left * policy.exact_gradient())
