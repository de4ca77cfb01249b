"""RLOO's advantages and loss, by hand and by enumeration, and what GRPO's kin share with it."""

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import cispo
import grpo
import gspo
import rloo

AGGREGATIONS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        # Sum 2.2; of the others: 1.4 / 3, 1.9 / 3, 1.6 / 3, 1.7 / 3.
        ([0.8, 0.3, 0.6, 0.5], [1 / 3, -1 / 3, 1 / 15, -1 / 15]),
        # Three of eight are right. The others of a right one have 2 of 7: 1 - 2 / 7; else 3 of 7.
        ([1.0] * 3 + [0.0] * 5, [0.714286] * 3 + [-0.428571] * 5),
        ([1.0, 2.0, 6.0], [-3.0, -1.5, 4.5]),  # 1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2
        ([1.0, 0.0], [1.0, -1.0]),
        ([1e8, 1e8 + 1], [-1.0, 1.0]),  # in float32 they would be equal
    ],
)
def test_the_baseline_is_the_mean_of_the_others(rewards, advantages):
    found = rloo.leave_one_out_advantages(torch.tensor([rewards], dtype=torch.float64))
    assert found.dtype == torch.float32
    near(found, [advantages])


def test_each_prompt_is_compared_with_its_own_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    third = 1 / 3  # 0 - 1 / 3 in the first group, 1 - 2 / 3 in the second
    expected = [[1.0, -third, -third, -third], [third, third, third, -1.0]]
    near(rloo.leave_one_out_advantages(rewards), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, -1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_a_uniform_group_is_exactly_zero(value, size, dtype):
    # Ten times 0.1, less 0.1, by nine is not 0.1.
    rewards = torch.tensor([[value] * size, [0.0, 1.0] + [0.0] * (size - 2)], dtype=dtype)
    advantages = rloo.leave_one_out_advantages(rewards)
    assert advantages[0].tolist() == [0.0] * size
    assert (advantages[1] != 0).all()


def test_rewards_that_differ_by_rounding_are_uniform():
    rewards = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.3 + 1e-6]], dtype=torch.float64)
    advantages = rloo.leave_one_out_advantages(rewards)
    assert advantages[0].tolist() == [0.0, 0.0] and (advantages[1] != 0).all()


@pytest.mark.parametrize("size", [2, 4, 16])
def test_grpo_without_the_std_is_a_fraction_of_it(size):
    # R - mean with R in it is (K - 1) / K of R - mean without.
    rewards = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    centred = grpo.group_advantages(rewards, scale_by_std=False)
    near(centred, (size - 1) / size * rloo.leave_one_out_advantages(rewards))


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


@pytest.mark.parametrize(
    "script, how",
    [(grpo, how) for how in AGGREGATIONS]
    + [(cispo, how) for how in AGGREGATIONS]
    + [(gspo, "sequence-mean")],  # elsewhere its ratio's mean over the tokens is one too many
)
def test_at_the_first_update_the_others_are_rloo_but_for_the_baseline(script, how):
    # All ratios are 1 and nothing is clipped. GRPO's advantage without the std is (K - 1) / K of
    # RLOO's, and no loss adds another factor.
    policy, rows = Policy(), torch.tensor([0, 1, 4, 5])
    logprobs, mask, rewards = policy.logprobs()[rows], policy.mask[rows], policy.rewards[rows][None]

    def gradient(losses):
        return policy.gradient((losses * script.loss_weights(mask, how, 2)).sum())

    advantages = script.group_advantages(rewards, scale_by_std=False).view(-1, 1)
    losses, clipped = script.policy_loss(logprobs, logprobs.detach(), advantages, mask)
    advantages = rloo.leave_one_out_advantages(rewards).view(-1, 1)
    expected = 3 / 4 * gradient(rloo.policy_loss(logprobs, advantages))
    assert expected.norm() > 0.1
    near(gradient(losses), expected)
    assert not clipped.any()
