"""CISPO's capped weights and loss: values and gradients, by hand and by enumeration."""

import inspect

import pytest
import torch
from conftest import near

import cispo


def loss_and_gradient(logprobs, ratio, advantages, *clip):
    """The loss per token, its gradient with respect to logprobs, and the capped bool."""
    logprobs, ratio = torch.tensor([logprobs], requires_grad=True), torch.tensor([ratio])
    old, mask = logprobs.detach() - ratio.log(), torch.ones(ratio.shape, dtype=torch.bool)
    loss, capped = cispo.policy_loss(logprobs, old, torch.tensor([advantages]), mask, *clip)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient, capped


def test_a_weight_is_at_most_5_and_the_token_keeps_its_gradient():
    loss, gradient, capped = loss_and_gradient([-0.1, -2.0], [6.0, 1.0], [1.0])
    # -weight A logp: 5 * 0.1 and 1 * 2. Without the detach the gradient would be -rho A (1 + logp)
    # where nothing is capped, +1 here: it would push a good token down. Its sign is that of -A.
    near(loss, [[0.5, 2.0]])
    near(gradient, [[-5.0, -1.0]])
    assert capped.tolist() == [[True, False]]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    "ratio, weight, capped",
    # PPO's points, then eps_low 0.1 and eps_high 0.5: each a distance from 1 on its own side.
    [(0.5, 0.8, True), (1.0, 1.0, False), (1.5, 1.2, True), (1.1, 1.1, False)]
    + [(0.85, 0.9, True), (0.95, 0.95, False), (1.4, 1.4, False), (1.6, 1.5, True)],
)
def test_the_gradient_is_the_clipped_ratio_everywhere(advantage, ratio, weight, capped):
    clip = (0.2, 0.2) if ratio in (0.5, 1.0, 1.5, 1.1) else (0.1, 0.5)
    loss, gradient, found = loss_and_gradient([-3.0], [ratio], [advantage], *clip)
    assert loss.item() == pytest.approx(3.0 * weight * advantage, abs=1e-6)
    assert gradient.item() == pytest.approx(-weight * advantage, abs=1e-6)
    assert found.item() is capped  # whatever the sign: it says what the weight is, not the loss


def test_there_is_no_lower_bound_by_default():
    args, signature = cispo.Args(), inspect.signature(cispo.policy_loss).parameters
    defaults = [signature[name].default for name in ("clip_eps_low", "clip_eps_high")]
    assert [args.clip_eps_low, args.clip_eps_high] == defaults == [1.0, 4.0]
    _, gradient, capped = loss_and_gradient([-1.0] * 3, [0.01, 4.9, 5.1], [-1.0])
    near(gradient, [[0.01, 4.9, 5.0]])
    assert capped.tolist() == [[False, False, True]]


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
