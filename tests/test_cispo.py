"""CISPO's capped weights and loss: values and gradients, by hand and by enumeration."""

import inspect
import math

import pytest
import torch
from conftest import FIXED, STOPPING, Policy, near

import cispo

NAN = math.nan


def loss_and_gradient(logprobs, ratio, advantages, **clip):
    """The loss per token, its gradient with respect to logprobs, and the capped bool."""
    logprobs, mask = logprobs.clone().requires_grad_(), torch.ones(ratio.shape, dtype=torch.bool)
    old = logprobs.detach() - ratio.log()
    loss, capped = cispo.policy_loss(logprobs, old, advantages, mask, **clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient, capped


# --------------------------------------------- Loss ---------------------------------------------
def test_a_weight_is_at_most_5_and_the_token_keeps_its_gradient():
    logprobs, ratio = torch.tensor([[-0.1, -2.0]]), torch.tensor([[6.0, 1.0]])
    loss, gradient, capped = loss_and_gradient(logprobs, ratio, torch.tensor([[1.0]]))
    # -weight A logp: 5 * 0.1 and 1 * 2. Without the detach the gradient would be -rho A (1 + logp)
    # where nothing is capped, +1 here: it would push a good token down. Its sign is that of -A.
    near(loss, [[0.5, 2.0]])
    near(gradient, [[-5.0, -1.0]])
    assert capped.tolist() == [[True, False]]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("ratio", "weight", "capped"),
    [(0.5, 0.8, True), (1.0, 1.0, False), (1.5, 1.2, True), (1.1, 1.1, False)],
)
def test_the_gradient_is_the_clipped_ratio_at_ppos_points(advantage, ratio, weight, capped):
    clip = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
    inputs = (torch.tensor([[-3.0]]), torch.tensor([[ratio]]), torch.tensor([[advantage]]))
    found = loss_and_gradient(*inputs, **clip)
    assert found[0].item() == pytest.approx(3.0 * weight * advantage, abs=1e-6)
    assert found[1].item() == pytest.approx(-weight * advantage, abs=1e-6)
    assert found[2].item() is capped  # whatever the sign: it says what the weight is, not the loss


def test_each_clip_flag_is_a_distance_from_1_on_its_own_side():
    # eps_low 0.1, eps_high 0.5: weights in [0.9, 1.5].
    logprobs, ratio = torch.full((1, 4), -1.0), torch.tensor([[0.85, 0.95, 1.4, 1.6]])
    clip = {"clip_eps_low": 0.1, "clip_eps_high": 0.5}
    _, gradient, capped = loss_and_gradient(logprobs, ratio, torch.tensor([[1.0]]), **clip)
    near(gradient, [[-0.9, -0.95, -1.4, -1.5]])
    assert capped.tolist() == [[True, False, False, True]]


def test_there_is_no_lower_bound_by_default():
    args, signature = cispo.Args(), inspect.signature(cispo.policy_loss).parameters
    defaults = [signature[name].default for name in ("clip_eps_low", "clip_eps_high")]
    assert [args.clip_eps_low, args.clip_eps_high] == defaults == [1.0, 4.0]
    ratio = torch.tensor([[0.01, 4.9, 5.1]])
    _, gradient, capped = loss_and_gradient(torch.full((1, 3), -1.0), ratio, torch.tensor([[-1.0]]))
    near(gradient, [[0.01, 4.9, 5.0]])
    assert capped.tolist() == [[False, False, True]]


def test_the_mean_is_over_the_tokens_of_the_batch():
    # One token and three: each has a quarter, not a half and a sixth.
    mask = torch.tensor([[False, True, False, False], [False, True, True, True]])
    logprobs = torch.full((2, 4), -2.0).requires_grad_()
    losses, _ = cispo.policy_loss(logprobs, logprobs.detach(), torch.tensor([[1.0], [-1.0]]), mask)
    loss = (losses * cispo.loss_weights(mask, cispo.Args().loss_aggregation, 8)).sum()
    loss.backward()
    assert loss.item() == pytest.approx((2.0 - 3 * 2.0) / 4)
    near(logprobs.grad, [[0.0, -0.25, 0.0, 0.0], [0.0, 0.25, 0.25, 0.25]])


# -------------------------------- The estimator is the gradient ---------------------------------
@pytest.mark.parametrize(
    ("completions", "how", "tokens"),
    [
        (FIXED, "token-mean", 2),  # all of two tokens: the mean over tokens is half of the sum
        (STOPPING, "sequence-sum", 1),
        (STOPPING, "constant", 2),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_at_one_update_the_expected_gradient_is_in_proportion_to_the_exact(
    completions, how, tokens, size
):
    policy = Policy(completions)
    logprobs = policy.logprobs(padding=NAN)

    def loss(rows):
        rewards = policy.rewards[rows][None]
        advantages = cispo.group_advantages(rewards, scale_by_std=False).view(-1, 1)
        inputs = (logprobs[rows], logprobs[rows].detach(), advantages, policy.mask[rows])
        weights = cispo.loss_weights(policy.mask[rows], how, 2)
        return (cispo.policy_loss(*inputs)[0] * weights).sum()

    # A completion is in its own baseline, so (G - 1) / G of its reward is left.
    expected = (size - 1) / size * policy.exact_gradient() / tokens
    near(policy.expected_gradient(loss, size), expected)


def test_the_weight_makes_an_old_policys_samples_unbiased():
    # One token, sampled from another policy: sum_c old(c) rho(c) R dlogp = sum_c p(c) R dlogp.
    logits = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([[0.5], [2.0], [-1.0]], dtype=torch.float64)
    logprobs, mask = logits.log_softmax(0)[:, None], torch.ones(3, 1, dtype=torch.bool)
    losses, capped = cispo.policy_loss(logprobs, old[:, None], rewards, mask)
    assert not capped.any()
    (found,) = torch.autograd.grad(-(old.exp() * losses[:, 0]).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits)
    near(found, exact)
