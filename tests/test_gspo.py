"""GSPO's sequence ratio and loss: values and gradients. PPO's cases are in test_grpo.py."""

import math

import pytest
import torch
from conftest import near

import gspo


@pytest.mark.parametrize(
    "ratios, mask, expected",
    [
        ([2.0, 0.5], [1, 1], 1.0),  # they cancel in the mean of the logs; their mean would be 1.25
        ([1.1] * 9, [1] * 9, 1.1),  # at any length: a product would be 1.1^9
        ([9.0, 1.1, 1.1, 9.0], [0, 1, 1, 0], 1.1),  # neither the prompt nor padding counts
        ([math.nan, 3.0], [0, 1], 3.0),
        ([3.0, 3.0], [0, 0], 1.0),  # no tokens
    ],
)
def test_the_ratio_is_the_geometric_mean(ratios, mask, expected):
    old = torch.linspace(-2, -1, len(ratios))[None]
    logprobs = old + torch.tensor([ratios]).log()
    found = gspo.sequence_ratio(logprobs, old, torch.tensor([mask]).bool())
    near(found, [[expected]], atol=5e-6)


def test_a_rows_tokens_share_its_ratio_and_its_clip():
    log_ratio = torch.tensor([[0.2, -0.1, 0.5], [0.1, 0.1, 0.1], [0.0] * 3, [0.0] * 3])
    log_ratio[2:, :2] = torch.tensor([[4.0, 0.5], [4.0, 0.25]]).log()
    mask = torch.tensor([[True, True, False], [True] * 3, [True, True, False], [True, True, False]])
    old, advantages = torch.full((4, 3), -1.0), torch.tensor([[2.0], [-3.0], [1.0], [1.0]])
    logprobs = (old + log_ratio).requires_grad_()
    loss, clipped = gspo.policy_loss(logprobs, old, advantages, mask, 0.2, 0.2)
    # s = exp(.05), exp(.1), sqrt(2) and 1: the third row is clipped at 1.2, though its second token
    # alone would not be; the first token of the last one would be.
    a, b = -2 * math.exp(0.05), 3 * math.exp(0.1)  # -A s
    near(loss, [[a, a, 0], [b, b, b], [-1.2, -1.2, 0], [-1, -1, 0]])
    assert clipped.tolist() == [[False] * 3] * 2 + [[True, True, False], [False] * 3]
    (loss * gspo.loss_weights(mask, "sequence-mean", 8)).sum().backward()
    # The mean of four rows; in a row each token has 1 / length of -A s, or nothing.
    rows = [[a / 2, a / 2, 0], [b / 3, b / 3, b / 3], [0] * 3, [-1 / 2, -1 / 2, 0]]
    near(logprobs.grad * 4, rows)
