"""GSPO's sequence ratio and loss: values and gradients, by hand and by enumeration."""

import inspect
import math

import pytest
import torch
from conftest import Policy, near

import grpo
import gspo

NAN = math.nan
WIDE = {"clip_eps_low": 0.2, "clip_eps_high": 0.2}


def full(*shape):
    return torch.ones(shape, dtype=torch.bool)


# --------------------------------------- The sequence ratio --------------------------------------
@pytest.mark.parametrize(
    ("ratios", "mask", "expected"),
    [
        ([2.0, 0.5], [1, 1], 1.0),  # they cancel in the mean of the logs; their mean would be 1.25
        ([1.1] * 4, [1] * 4, 1.1),
        ([1.1] * 9, [1] * 9, 1.1),  # at any length: a product would be 1.1^9
        ([1.1] * 9, [1] * 2 + [0] * 7, 1.1),
        ([9.0, 1.1, 9.0], [0, 1, 0], 1.1),  # neither the prompt nor padding counts
        ([4.0, 1.0], [1, 1], 2.0),  # sqrt(4)
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


def test_each_row_has_a_ratio_of_its_own():
    log_ratio = torch.tensor([0.1, 0.2, 0.3])[:, None].expand(3, 5)
    ratio = gspo.sequence_ratio(log_ratio, torch.zeros(3, 5), full(3, 5))
    near(ratio, torch.tensor([[0.1], [0.2], [0.3]]).exp())  # (B, 1)
    advantages = torch.tensor([[1.0], [2.0], [3.0]])
    loss, clipped = gspo.policy_loss(log_ratio, torch.zeros(3, 5), advantages, full(3, 5), 1.0, 1.0)
    assert loss.shape == clipped.shape == (3, 5)
    near(loss, -(ratio * advantages).expand(3, 5))


# --------------------------------------------- Loss ---------------------------------------------
def loss_and_gradient(log_ratio, advantages, mask=None, **clip):
    """(loss per token, gradient of the mean of the rows' mean loss, the clipped bool)."""
    old = torch.full_like(log_ratio, -1.0)
    logprobs = (old + log_ratio).requires_grad_()
    mask = full(*log_ratio.shape) if mask is None else mask
    loss, clipped = gspo.policy_loss(logprobs, old, advantages, mask, **clip)
    weighted = loss * gspo.loss_weights(mask, "sequence-mean", 8)
    (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
    return loss.detach(), gradient, clipped


# (A, s) -> loss, its gradient with respect to log s, clipped: -min(s A, clip(s, 0.8, 1.2) A).
CASES = [
    (1.0, 0.5, -0.5, -0.5, False),
    (1.0, 1.0, -1.0, -1.0, False),
    (1.0, 1.5, -1.2, 0.0, True),
    (-1.0, 0.5, 0.8, 0.0, True),
    (-1.0, 1.0, 1.0, 1.0, False),
    (-1.0, 1.5, 1.5, 1.5, False),
    (0.0, 1.5, 0.0, 0.0, False),
    (0.0, 0.5, 0.0, 0.0, False),
]


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(("advantage", "ratio", "loss", "gradient", "clipped"), CASES)
def test_ppo_cases_of_a_whole_completion(length, advantage, ratio, loss, gradient, clipped):
    # The tokens' log-ratios differ, and their mean is log s. log s has 1 / length of each token's.
    spread = torch.linspace(-0.5, 0.5, length) if length > 1 else torch.zeros(1)
    found = loss_and_gradient(math.log(ratio) + spread[None], torch.tensor([[advantage]]), **WIDE)
    near(found[0], [[loss] * length])
    near(found[1], [[gradient / length] * length])
    assert found[2].tolist() == [[clipped] * length]


def test_the_gradient_of_a_token_is_the_ratio_over_the_length():
    log_ratio, mask = torch.tensor([[0.2, -0.1, 0.5]]), torch.tensor([[True, True, False]])
    _, gradient, _ = loss_and_gradient(log_ratio, torch.tensor([[2.0]]), mask, **WIDE)
    each = -2.0 * math.exp(0.05) / 2  # -A s / length
    near(gradient, [[each, each, 0.0]])


def test_no_token_of_a_clipped_completion_has_a_gradient():
    # Row 0: ratios 4 and 0.5, s = sqrt(2) > 1.2. Its second token alone would not be clipped.
    # Row 1: ratios 4 and 0.25, s = 1. Its first token alone would be.
    log_ratio = torch.tensor([[4.0, 0.5], [4.0, 0.25]]).log()
    _, gradient, clipped = loss_and_gradient(log_ratio, torch.tensor([[1.0], [1.0]]), **WIDE)
    near(gradient, [[0.0, 0.0], [-0.25, -0.25]])  # -1 * 1 / 2 tokens / 2 rows
    assert clipped.tolist() == [[True, True], [False, False]]


def test_the_clip_is_the_papers():
    args, signature = gspo.Args(), inspect.signature(gspo.policy_loss).parameters
    defaults = [signature[name].default for name in WIDE]
    assert [args.clip_eps_low, args.clip_eps_high] == defaults == [3e-4, 4e-4]
    # 1.00035 is above 1 + 3e-4 and below 1 + 4e-4; 0.99965 is below 1 - 3e-4.
    ratio = torch.tensor([[1.00035], [1.00045], [0.99975], [0.99965]], dtype=torch.float64)
    loss, _, clipped = loss_and_gradient(ratio.log(), torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]))
    near(loss, [[-1.00035], [-1.0004], [0.99975], [0.9997]], atol=1e-9)
    assert clipped.tolist() == [[False], [True], [False], [True]]


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_at_the_first_update_its_expected_gradient_is_grpos(scale_by_std):
    # At s = 1, ds = the mean of dlogp: GRPO's mean over tokens.
    policy = Policy()
    logprobs = policy.logprobs(padding=NAN)

    def loss_of(script):
        def loss(rows):
            rewards = policy.rewards[rows][None]
            advantages = script.group_advantages(rewards, scale_by_std).view(-1, 1)
            given = (logprobs[rows], logprobs[rows].detach(), advantages, policy.mask[rows])
            weights = script.loss_weights(policy.mask[rows], "sequence-mean", 2)
            return (script.policy_loss(*given)[0] * weights).sum()

        return loss

    expected = policy.expected_gradient(loss_of(grpo), 2)
    assert expected.norm() > 0.05
    near(policy.expected_gradient(loss_of(gspo), 2), expected)
