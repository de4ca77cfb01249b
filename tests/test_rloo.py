"""RLOO's advantages and loss, by hand and by enumeration, and what GRPO's kin share with it."""

from functools import partial

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import cispo
import grpo
import gspo
import rloo

HOWS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]


@pytest.mark.parametrize(
    "rewards, advantages",
    [
        # Sum 2.2; of the others: 1.4 / 3, 1.9 / 3, 1.6 / 3, 1.7 / 3.
        ([[0.8, 0.3, 0.6, 0.5]], [[1 / 3, -1 / 3, 1 / 15, -1 / 15]]),
        # Three of eight are right. The others of a right one have 2 of 7: 1 - 2 / 7; else 3 of 7.
        ([[1.0] * 3 + [0.0] * 5], [[0.714286] * 3 + [-0.428571] * 5]),
        ([[1.0, 2.0, 6.0]], [[-3.0, -1.5, 4.5]]),  # 1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2
        ([[1e8, 1e8 + 1]], [[-1.0, 1.0]]),  # in float32 they would be equal
        # Each prompt with its own group: 0 - 1 / 3 in the first, 1 - 2 / 3 in the second.
        ([[1.0, 0, 0, 0], [1, 1, 1, 0]], [[1.0] + [-1 / 3] * 3, [1 / 3] * 3 + [-1]]),
    ],
)
def test_the_baseline_is_the_mean_of_the_others(rewards, advantages):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    near(rloo.leave_one_out_advantages(rewards), advantages)
    # GRPO's without the std has its own reward in the mean: (K - 1) / K of it.
    fraction = (rewards.shape[1] - 1) / rewards.shape[1] * torch.tensor(advantages)
    near(grpo.group_advantages(rewards, scale_by_std=False), fraction)


CENTRED = partial(grpo.group_advantages, scale_by_std=False)


@pytest.mark.parametrize(
    "function", [rloo.leave_one_out_advantages, grpo.group_advantages, CENTRED]
)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, -1 / 3, 1e6])
def test_a_uniform_group_is_exactly_zero_and_no_other(function, value):
    # The mean of ten times 0.1 is not 0.1, and the rest divided by eps would be large.
    for size in (2, 3, 7, 10):
        rewards = [[value] * size, [0.0, 1.0] + [0.0] * (size - 2)]
        for dtype in (torch.float32, torch.float64):
            advantages = function(torch.tensor(rewards, dtype=dtype))
            assert advantages[0].tolist() == [0.0] * size and (advantages[1] != 0).all()
    rewards = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.3 + 1e-6]], dtype=torch.float64)
    advantages = function(rewards)  # two that differ by rounding are one value
    assert advantages[0].tolist() == [0.0, 0.0] and (advantages[1] != 0).all()
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize("completions", [STOPPING, FIXED])
@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_gradient_is_exact(completions, size):
    policy = Policy(completions)

    def loss(rows):
        advantages = rloo.leave_one_out_advantages(policy.rewards[rows][None]).view(-1, 1)
        losses = rloo.policy_loss(policy.logprobs()[rows], advantages)
        return (losses * rloo.loss_weights(policy.mask[rows], "sequence-sum", 2)).sum()

    assert policy.exact_gradient().norm() > 0.1
    near(policy.expected_gradient(loss, size), policy.exact_gradient())


# In another aggregation GSPO has one mean over the tokens too many.
PAIRS = [(grpo, how) for how in HOWS] + [(cispo, how) for how in HOWS] + [(gspo, "sequence-mean")]


@pytest.mark.parametrize("script, how", PAIRS)
def test_at_the_first_update_the_others_are_rloo_but_for_the_baseline(script, how):
    # All ratios are 1 and nothing is clipped: (K - 1) / K of RLOO's, and no other factor.
    policy, rows = Policy(), torch.tensor([0, 1, 4, 5])
    logprobs, mask, rewards = policy.logprobs()[rows], policy.mask[rows], policy.rewards[rows][None]

    def gradient(losses):
        return policy.gradient((losses * script.loss_weights(mask, how, 2)).sum())

    advantages = script.group_advantages(rewards, scale_by_std=False).view(-1, 1)
    losses, clipped = script.policy_loss(logprobs, logprobs.detach(), advantages, mask)
    advantages = rloo.leave_one_out_advantages(rewards).view(-1, 1)
    expected = 3 / 4 * gradient(rloo.policy_loss(logprobs, advantages))
    assert expected.norm() > 0.1 and not clipped.any()
    near(gradient(losses), expected)
