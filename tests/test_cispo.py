"""CISPO's capped weights and loss: values and gradients, by hand and by enumeration."""

import inspect
import math

import pytest
import torch
from toy import (
    FIXED,
    STOPPING,
    Policy,
    flat_gradient,
    gradient_of_update,
    make_batch,
    near,
    plain_logprobs,
    run_main,
)

import cispo

NAN, INF = math.nan, math.inf


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
    near(loss, torch.tensor([[0.5, 2.0]]))
    near(gradient, torch.tensor([[-5.0, -1.0]]))
    assert capped.tolist() == [[True, False]]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    ("ratio", "weight", "capped"),
    [(0.5, 0.8, True), (1.0, 1.0, False), (1.5, 1.2, True), (1.1, 1.1, False)],
)
def test_the_gradient_is_the_clipped_ratio_at_ppos_points(advantage, ratio, weight, capped):
    clip = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}
    given = (torch.tensor([[-3.0]]), torch.tensor([[ratio]]), torch.tensor([[advantage]]))
    found = loss_and_gradient(*given, **clip)
    assert found[0].item() == pytest.approx(3.0 * weight * advantage, abs=1e-6)
    assert found[1].item() == pytest.approx(-weight * advantage, abs=1e-6)
    assert found[2].item() is capped  # whatever the sign: it says what the weight is, not the loss


def test_each_clip_flag_is_a_distance_from_1_on_its_own_side():
    # eps_low 0.1, eps_high 0.5: weights in [0.9, 1.5].
    ratio = torch.tensor([[0.85, 0.95, 1.4, 1.6]])
    clip = {"clip_eps_low": 0.1, "clip_eps_high": 0.5}
    _, gradient, capped = loss_and_gradient(
        torch.full((1, 4), -1.0), ratio, torch.tensor([[1.0]]), **clip
    )
    near(gradient, torch.tensor([[-0.9, -0.95, -1.4, -1.5]]))
    assert capped.tolist() == [[True, False, False, True]]


def test_there_is_no_lower_bound_by_default():
    args, signature = cispo.Args(), inspect.signature(cispo.policy_loss).parameters
    assert (args.clip_eps_low, args.clip_eps_high) == (1.0, 4.0)
    assert signature["clip_eps_low"].default == 1.0
    assert signature["clip_eps_high"].default == 4.0
    ratio = torch.tensor([[0.01, 4.9, 5.1]])
    _, gradient, capped = loss_and_gradient(torch.full((1, 3), -1.0), ratio, torch.tensor([[-1.0]]))
    near(gradient, torch.tensor([[0.01, 4.9, 5.0]]))
    assert capped.tolist() == [[False, False, True]]


def test_the_mean_is_over_the_tokens_of_the_batch():
    # One token and three: each has a quarter, not a half and a sixth.
    mask = torch.tensor([[False, True, False, False], [False, True, True, True]])
    logprobs = torch.full((2, 4), -2.0).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0]])
    losses, _ = cispo.policy_loss(logprobs, logprobs.detach(), advantages, mask)
    loss = (losses * cispo.loss_weights(mask, cispo.Args().loss_aggregation, 8)).sum()
    loss.backward()
    assert loss.item() == pytest.approx((2.0 - 3 * 2.0) / 4)
    assert logprobs.grad.tolist() == [[0.0, -0.25, 0.0, 0.0], [0.0, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "advantages"])
def test_what_is_masked_changes_nothing(bad, where):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    inputs = {
        "logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.0]]),
        "old_logprobs": torch.tensor([[-4.0, -1.8, -1.0], [-0.1, -1.6, -3.0]]),  # the first capped
        "advantages": torch.tensor([[1.0, -1.0, 2.0], [0.5, -2.0, 1.0]]),
    }

    def run(values):
        logprobs = values["logprobs"].clone().requires_grad_()
        others = (values["old_logprobs"], values["advantages"])
        loss, capped = cispo.policy_loss(logprobs, *others, mask)
        weighted = loss * cispo.loss_weights(mask, "token-mean", 3)
        (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
        return loss.detach(), gradient, capped

    expected = run(inputs)
    found = run({**inputs, where: torch.where(mask, inputs[where], bad)})
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert (found[0][~mask] == 0).all() and (found[1][~mask] == 0).all()
    assert not found[2][~mask].any() and found[2][0, 0]


# -------------------------------- The estimator is the gradient ---------------------------------
def expected_gradient(policy, size, how):
    logprobs = policy.logprobs(padding=NAN)

    def loss(rows):
        rewards = policy.rewards[rows][None]
        advantages = cispo.group_advantages(rewards, scale_by_std=False).view(-1, 1)
        given = (logprobs[rows], logprobs[rows].detach(), advantages, policy.mask[rows])
        weights = cispo.loss_weights(policy.mask[rows], how, 2)
        return (cispo.policy_loss(*given)[0] * weights).sum()

    return policy.expected_gradient(loss, size)


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
    # A completion is in its own baseline, so (G - 1) / G of its reward is left.
    policy = Policy(completions)
    expected = (size - 1) / size * policy.exact_gradient() / tokens
    near(expected_gradient(policy, size, how), expected)


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


# ------------------------------------------- In a run -------------------------------------------
def test_the_gradient_of_an_update_is_the_formulas(tiny_model, tokenizer):
    batch = make_batch(tiny_model, tokenizer)
    mask = batch["mask"]
    generator = torch.Generator().manual_seed(1)
    ratio = torch.empty(mask.shape).uniform_(0.5, 8.0, generator=generator)
    batch["old_logprobs"] = (batch["engine_logprobs"] - ratio.log()) * mask
    assert ((ratio > 5) & mask).any() and ((ratio < 5) & mask).any()
    weighted = ratio.clamp(max=5) * batch["advantages"] * plain_logprobs(tiny_model, batch)
    expected = flat_gradient(tiny_model, -weighted.sum() / mask.sum())
    found = gradient_of_update(cispo, tiny_model, batch, mismatch_cap=0.0)
    near(found / expected.norm(), expected / expected.norm())


def test_advantages_are_grpos_of_each_prompts_rows(tmp_path, monkeypatch):
    (step,), _ = run_main(cispo, tmp_path, monkeypatch)
    groups = step.rewards.view(2, 4)
    std = groups.std(1, correction=0, keepdim=True)
    assert std.min() > 0.1
    near(step.batch["advantages"], ((groups - groups.mean(1, keepdim=True)) / std).view(-1, 1))
