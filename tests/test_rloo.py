"""RLOO's advantages and loss, by hand and by enumeration, and what GRPO's kin share with it."""

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

import cispo
import grpo
import gspo
import rloo

AGGREGATIONS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]


# ------------------------------------------ Advantages ------------------------------------------
@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        # Sum 2.2; of the others: 1.4 / 3, 1.9 / 3, 1.6 / 3, 1.7 / 3.
        ([0.8, 0.3, 0.6, 0.5], [1 / 3, -1 / 3, 1 / 15, -1 / 15]),
        # Three of eight are right. The others of a right one have 2 of 7: 1 - 2 / 7; else 3 of 7.
        ([1.0] * 3 + [0.0] * 5, [0.714286] * 3 + [-0.428571] * 5),
        ([1.0, 2.0, 6.0], [-3.0, -1.5, 4.5]),  # 1 - 8 / 2, 2 - 7 / 2, 6 - 3 / 2
        ([1.0, 0.0], [1.0, -1.0]),
    ],
)
def test_the_baseline_is_the_mean_of_the_others(rewards, advantages):
    found = rloo.leave_one_out_advantages(torch.tensor([rewards]))
    near(found, torch.tensor([advantages]))


def test_each_prompt_is_compared_with_its_own_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    third = 1 / 3  # 0 - 1 / 3 in the first group, 1 - 2 / 3 in the second
    expected = torch.tensor([[1.0, -third, -third, -third], [third, third, third, -1.0]])
    near(rloo.leave_one_out_advantages(rewards), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, -1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_a_uniform_group_is_exactly_zero(value, size):
    # Ten times 0.1, less 0.1, by nine is not 0.1 in float32.
    rewards = torch.tensor([[value] * size, [0.0, 1.0] + [0.0] * (size - 2)])
    advantages = rloo.leave_one_out_advantages(rewards)
    assert advantages[0].tolist() == [0.0] * size
    assert (advantages[1] != 0).all()


@pytest.mark.parametrize("size", [2, 4, 16])
def test_grpo_without_the_std_is_a_fraction_of_it(size):
    # R - mean with R in it is (K - 1) / K of R - mean without.
    rewards = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    centred = grpo.group_advantages(rewards, scale_by_std=False)
    near(centred, (size - 1) / size * rloo.leave_one_out_advantages(rewards))


# -------------------------------- The estimator is the gradient ---------------------------------
@pytest.mark.parametrize("completions", [STOPPING, FIXED])
@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_gradient_is_exact(completions, size):
    policy = Policy(completions)

    def loss(rows):
        advantages = rloo.leave_one_out_advantages(policy.rewards[rows][None]).view(-1, 1)
        losses = rloo.policy_loss(policy.logprobs()[rows], advantages)
        return (losses * rloo.loss_weights(policy.mask[rows], "sequence-sum", 2)).sum()

    near(policy.expected_gradient(loss, size), policy.exact_gradient())


@pytest.mark.parametrize("script", [grpo, gspo, cispo])
@pytest.mark.parametrize("how", AGGREGATIONS)
def test_at_the_first_update_the_others_are_rloo_but_for_the_baseline(script, how):
    # All ratios are 1 and nothing is clipped, whatever the aggregation. GRPO's advantage without
    # the std is (K - 1) / K of RLOO's, and no loss adds another factor.
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


# -------------------------------------- The loss of a batch -------------------------------------
def test_the_loss_is_summed_over_tokens_and_averaged_over_completions():
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    logprobs = torch.full((2, 4), -2.0).requires_grad_()
    losses = rloo.policy_loss(logprobs, torch.tensor([[1.0], [-1.0]]))
    loss = (losses * rloo.loss_weights(mask, rloo.Args().loss_aggregation, 8)).sum()
    loss.backward()
    assert loss.item() == pytest.approx((3 * 2.0 - 2.0) / 2)
    # -A / B for each token, however many there are
    assert logprobs.grad.tolist() == [[0.0, -0.5, -0.5, -0.5], [0.0, 0.5, 0.0, 0.0]]


def test_the_gradient_of_an_update_is_the_formulas(tiny_model, tokenizer):
    batch = make_batch(tiny_model, tokenizer)
    loss = -(batch["advantages"] * plain_logprobs(tiny_model, batch)).sum(1).mean()
    expected = flat_gradient(tiny_model, loss)
    found = gradient_of_update(rloo, tiny_model, batch)
    near(found / expected.norm(), expected / expected.norm())


# ------------------------------------------- In a run -------------------------------------------
def leave_one_out(returns):
    """Advantages (8, 1) of two prompts' groups of four, one at a time."""
    found = []
    for row, own in enumerate(returns):
        group = [r for other, r in enumerate(returns) if other // 4 == row // 4 and other != row]
        found.append([own - sum(group) / 3])
    return torch.tensor(found)


def test_advantages_are_of_each_prompts_rows(tmp_path, monkeypatch):
    (step,), _ = run_main(rloo, tmp_path, monkeypatch)
    assert step.rewards.std() > 0.1
    near(step.batch["advantages"], leave_one_out(step.rewards.tolist()))


def test_the_kl_of_the_whole_completion_is_in_its_reward(tmp_path, monkeypatch):
    flags = {"steps": 2, "beta": 0.5, "learning_rate": 3e-3}
    (_, step), rows = run_main(rloo, tmp_path, monkeypatch, **flags)
    with torch.no_grad():  # k1 = logp - ref_logp, of the policy before its second update
        ours = plain_logprobs(step.models[0], step.batch)
        k1 = ours - plain_logprobs(initial_model(), step.batch)
    returns = step.rewards - 0.5 * k1.sum(1)
    assert (
        leave_one_out(returns.tolist()) - leave_one_out(step.rewards.tolist())
    ).abs().max() > 0.1
    near(step.batch["advantages"], leave_one_out(returns.tolist()), atol=1e-4)
    kl = k1[step.batch["mask"]].mean().item()
    assert rows[-1]["kl/mean"] == pytest.approx(kl, abs=1e-5)
