"""CISPO's capped weights and loss: values and gradients, by hand."""

import pytest
import torch
from conftest import near

import cispo


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(
    "clip, ratios, weights, capped",
    [
        # PPO's points, then eps_low 0.1 and eps_high 0.5: each a distance from 1 on its own side.
        ((0.2, 0.2), [0.5, 1.0, 1.5, 1.1], [0.8, 1.0, 1.2, 1.1], [1, 0, 1, 0]),
        ((0.1, 0.5), [0.85, 0.95, 1.4, 1.6], [0.9, 0.95, 1.4, 1.5], [1, 0, 0, 1]),
        ((), [0.01, 1.0, 4.9, 6.0], [0.01, 1.0, 4.9, 5.0], [0, 0, 0, 1]),  # 5 is all that bounds
    ],
)
def test_the_gradient_is_the_clipped_ratio_everywhere(advantage, clip, ratios, weights, capped):
    logprobs = torch.tensor([[-0.1, -2.0, -3.0, -1.0]], requires_grad=True)
    old, mask = logprobs.detach() - torch.tensor([ratios]).log(), torch.ones(1, 4).bool()
    loss, found = cispo.policy_loss(logprobs, old, torch.tensor([[advantage]]), mask, *clip)
    loss.sum().backward()
    weights = torch.tensor([weights])
    near(loss, -weights * advantage * logprobs.detach())
    # Without the detach it would be -rho A (1 + logp) where nothing is capped: of another sign at
    # logp < -1, so that a good token were pushed down.
    near(logprobs.grad, -weights * advantage)
    assert found.tolist() == [capped]  # whatever A's sign: it says what the weight is, not the loss
