"""RLOO's advantages and loss by hand, and by enumeration with those of GRPO's kin."""

from functools import partial

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import cispo
import grpo
import gspo
import rloo


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
ADVANTAGES = [rloo.leave_one_out_advantages, grpo.group_advantages, CENTRED]


@pytest.mark.parametrize("function", ADVANTAGES)
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
@pytest.mark.parametrize("script", [rloo, grpo, gspo, cispo], ids=lambda script: script.SCRIPT)
def test_the_expected_gradient_is_that_of_the_expected_reward(script, size, completions):
    # Of the others at the first update, where all ratios are 1, and without the std: a completion
    # is in its own baseline, so (K - 1) / K of it is left.
    policy = Policy(completions)
    logprobs, old = policy.logprobs(), policy.logprobs().detach()

    def loss(rows):
        rewards, mask = policy.rewards[rows][None], policy.mask[rows]
        if script is rloo:
            losses = rloo.policy_loss(logprobs[rows], rloo.leave_one_out_advantages(rewards).T)
        else:
            advantages = script.group_advantages(rewards, scale_by_std=False).T
            losses, clipped = script.policy_loss(logprobs[rows], old[rows], advantages, mask)
            assert not clipped.any()
        return (losses * script.loss_weights(mask, "sequence-sum", 2)).sum()

    exact = policy.exact_gradient() * (1 if script is rloo else (size - 1) / size)
    assert exact.norm() > 0.1
    near(policy.expected_gradient(loss, size), exact)
