"""GSPO's sequence ratio and loss: values and gradients. PPO's cases are in test_grpo.py."""

import inspect
import math

import pytest
import torch
from conftest import near

import gspo

NAN = math.nan


@pytest.mark.parametrize(
    "ratios, mask, expected",
    [
        ([2.0, 0.5], [1, 1], 1.0),  # they cancel in the mean of the logs; their mean would be 1.25
        ([1.1] * 4, [1] * 4, 1.1),
        ([1.1] * 9, [1] * 9, 1.1),  # at any length: a product would be 1.1^9
        ([9.0, 1.1, 1.1, 9.0], [0, 1, 1, 0], 1.1),  # neither the prompt nor padding counts
        ([math.exp(0.2), math.exp(-0.1), math.exp(0.5)], [1, 1, 0], 1.05127),  # exp(.05)
        ([NAN, 3.0], [0, 1], 3.0),
        ([3.0, 3.0], [0, 0], 1.0),  # no tokens
    ],
)
def test_the_ratio_is_the_geometric_mean(ratios, mask, expected):
    old = torch.linspace(-2, -1, len(ratios))[None]
    logprobs = old + torch.tensor([ratios]).log()
    found = gspo.sequence_ratio(logprobs, old, torch.tensor([mask]).bool())
    near(found, [[expected]], atol=5e-6)


def loss_and_gradient(log_ratio, advantages, mask=None, eps=0.2):
    """(loss per token, gradient of the mean of the rows' mean loss, the clipped bool)."""
    old = torch.full_like(log_ratio, -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    mask = torch.ones(log_ratio.shape).bool() if mask is None else mask
    clip = {"clip_eps_low": eps, "clip_eps_high": eps} if eps else {}
    loss, clipped = gspo.policy_loss(logprobs, old, advantages, mask, **clip)
    weighted = loss * gspo.loss_weights(mask, "sequence-mean", 8)
    (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
    return loss.detach(), gradient, clipped


def test_each_row_has_a_ratio_of_its_own_on_each_token():
    # B = 3 and T = 5 must not become (B, B). The gradient of a token is -A s / length / B.
    log_ratio = torch.tensor([0.1, 0.2, 0.3])[:, None].expand(3, 5)
    advantages = torch.tensor([[1.0], [2.0], [3.0]])
    loss, gradient, clipped = loss_and_gradient(log_ratio, advantages, eps=1.0)
    assert loss.shape == clipped.shape == (3, 5)
    near(loss, -(log_ratio.exp() * advantages))
    near(gradient, loss / 5 / 3)


def test_the_gradient_of_a_token_is_the_ratio_over_the_length():
    log_ratio, mask = torch.tensor([[0.2, -0.1, 0.5]]), torch.tensor([[True, True, False]])
    _, gradient, _ = loss_and_gradient(log_ratio, torch.tensor([[2.0]]), mask)
    each = -2.0 * math.exp(0.05) / 2  # -A s / length
    near(gradient, [[each, each, 0.0]])


def test_no_token_of_a_clipped_completion_has_a_gradient():
    # Row 0: ratios 4 and 0.5, s = sqrt(2) > 1.2. Its second token alone would not be clipped.
    # Row 1: ratios 4 and 0.25, s = 1. Its first token alone would be.
    log_ratio = torch.tensor([[4.0, 0.5], [4.0, 0.25]]).log()
    _, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[1.0], [1.0]]))
    near(gradient, [[0.0, 0.0], [-0.25, -0.25]])  # -1 * 1 / 2 tokens / 2 rows
    assert clipped.tolist() == [[True, True], [False, False]]


def test_the_clip_is_the_papers():
    args, signature = gspo.Args(), inspect.signature(gspo.policy_loss).parameters
    defaults = [signature[name].default for name in ("clip_eps_low", "clip_eps_high")]
    assert [args.clip_eps_low, args.clip_eps_high] == defaults == [3e-4, 4e-4]
    # 1.00035 is above 1 + 3e-4 and below 1 + 4e-4; 0.99965 is below 1 - 3e-4.
    ratio = torch.tensor([[1.00035], [1.00045], [0.99975], [0.99965]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])
    loss, _, clipped = loss_and_gradient(ratio.log(), advantages, eps=None)
    near(loss, [[-1.00035], [-1.0004], [0.99975], [0.9997]], atol=1e-9)
    assert clipped.tolist() == [[False], [True], [False], [True]]
