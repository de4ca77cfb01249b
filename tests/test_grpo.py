"""GRPO's advantage, loss and update, and what the others share with it: the clip, the weights of
the tokens, that no log-prob makes a loss infinite. Values and gradients, against numbers by hand.
"""

import math
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import Recorder, flat_gradient, make_batch, naive, near
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

NAN, INF = math.nan, math.inf
HOWS = ["sequence-sum", "sequence-mean", "token-mean", "constant"]


# ------------------------------------------ Advantages ------------------------------------------
@pytest.mark.parametrize(
    "rewards, advantages",
    [
        # Mean 0.55; population variance (0.0625 + 0.0625 + 0.0025 + 0.0025) / 4 = 0.0325, whose
        # root is 0.18028: 0.25 / 0.18028 = 1.38675. Without the std they are in test_rloo.py.
        ([[0.8, 0.3, 0.6, 0.5]], [[1.38675, -1.38675, 0.27735, -0.27735]]),
        # Each prompt with its own group. Second one: mean 7.5, std sqrt(3 * 6.25 + 56.25) / 2 =
        # 4.330, so 2.5 / 4.330 = .57735.
        ([[1.0, 0, 0, 1], [10, 10, 10, 0]], [[1.0, -1, -1, 1], [0.57735] * 3 + [-1.73205]]),
        # p = 1/4: (1 - p) / sqrt(p (1 - p)) = sqrt(3), -p / sqrt(p (1 - p)) = -1 / sqrt(3);
        # a z-score does not know the scale of the rewards.
        ([[1.0, 0.9, 0.9, 0.9]], [[3**0.5] + [-(3**-0.5)] * 3]),
        ([[1e8, 1e8 + 1]], [[-1.0, 1.0]]),  # in float32 they would be equal
        ([[1e29, -1e29]], [[1.0, -1.0]]),
    ],
)
def test_advantages_are_deviations_from_the_group(rewards, advantages):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    near(grpo.group_advantages(rewards), advantages, atol=1e-5)


# --------------------------------------------- Loss ---------------------------------------------
@pytest.mark.parametrize("script", [grpo, ppo, gspo], ids=lambda script: script.SCRIPT)
@pytest.mark.parametrize(
    "clip, ratios, positive, negative",
    [
        # [loss, its gradient, clipped] at A = 1 and at A = -1: -min(rho A, clip(rho, 0.8, 1.2) A).
        # Where rho A is chosen d(-rho A)/dlogp = -rho A; where the clip is, it is a constant.
        (
            (0.2, 0.2),
            [0.5, 1.0, 1.5],
            [[-0.5, -0.5, 0], [-1, -1, 0], [-1.2, 0, 1]],
            [[0.8, 0, 1], [1, 1, 0], [1.5, 1.5, 0]],
        ),
        (  # Each flag is a distance from 1 on its own side: clipped to [0.9, 1.5].
            (0.1, 0.5),
            [1.4, 1.6, 0.95, 0.85],
            [[-1.4, -1.4, 0], [-1.5, 0, 1], [-0.95, -0.95, 0], [-0.85, -0.85, 0]],
            [[1.4, 1.4, 0], [1.6, 1.6, 0], [0.95, 0.95, 0], [0.9, 0, 1]],
        ),
    ],
)
def test_ppo_cases(script, clip, ratios, positive, negative):
    for advantage, expected in ((1.0, positive), (-1.0, negative), (0.0, [[0] * 3] * len(ratios))):
        log_ratio = torch.tensor(ratios)[:, None].log()  # of completions of one token
        old, mask = torch.full_like(log_ratio, -1.0), torch.ones(log_ratio.shape).bool()
        logprobs = (old + log_ratio).requires_grad_()
        given = torch.full_like(old, advantage)
        loss, clipped = script.policy_loss(logprobs, old, given, mask, *clip)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        near(torch.cat([loss.detach(), gradient, clipped], 1), expected)


CLIPS = [(grpo, (0.2, 0.2)), (ppo, (0.2, 0.2)), (gspo, (3e-4, 4e-4)), (cispo, (1.0, 4.0))]


@pytest.mark.parametrize("script, clip", CLIPS)
def test_the_clip_is_the_papers_by_default(script, clip):
    args = script.Args()
    assert script.policy_loss.__defaults__ == (args.clip_eps_low, args.clip_eps_high) == clip


# ------------------------------- What no log-prob and no padding does ----------------------------
def penalty_loss(logprobs, old_logprobs, advantages, mask):
    """PPO's other objective, with the results of policy_loss."""
    return ppo.penalty_loss(logprobs, old_logprobs, advantages, mask, 0.5), mask & False


gspo_loss = partial(gspo.policy_loss, clip_eps_low=0.2, clip_eps_high=0.2)
LOSSES = {"grpo": grpo.policy_loss, "ppo": ppo.policy_loss, "ppo penalty": penalty_loss}
LOSSES |= {"gspo": gspo_loss, "cispo": cispo.policy_loss}
every_loss = pytest.mark.parametrize("policy_loss", LOSSES.values(), ids=LOSSES)


@every_loss
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", [0, 1, 2])  # in logprobs, old_logprobs, advantages
def test_what_is_masked_changes_nothing(policy_loss, bad, where):
    mask = torch.tensor([[True, True, False], [False, True, False]])
    logprobs, old = [[-1.0, -2, -0.5], [-0.3, -1.5, -2]], [[-1.1, -1.8, -1], [-0.1, -1.6, -3]]
    clean = torch.tensor([logprobs, old, [[1.0, 1, 2], [0.5, -2, 1]]])
    spoilt = clean.clone()
    spoilt[where, ~mask] = bad

    def run(inputs):
        logprobs, *others = inputs.requires_grad_()
        loss, clipped = policy_loss(logprobs, *others, mask)
        weighted = loss * grpo.loss_weights(mask, "token-mean", 3)
        (gradient,) = torch.autograd.grad(weighted.sum(), logprobs)
        return loss.detach(), gradient, clipped

    found, expected = run(spoilt), run(clean)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and not a[~mask].any()
    assert (found[0][mask] != 0).all() and (found[1][mask] != 0).all()


@every_loss
@pytest.mark.parametrize("distance", [200.0, 1e5])  # exp(89) is infinite in float32
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_distance_to_the_old_policy_is_infinite(policy_loss, distance, advantage, sign):
    # Far above the old policy (sign 1) or below; in float32, as the scripts compute.
    old = torch.full((1, 2), -sign * distance)
    logprobs, mask = torch.zeros(1, 2).requires_grad_(), torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, old, torch.tensor([[advantage]]), mask)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert loss.isfinite().all() and gradient.isfinite().all()
    if policy_loss is penalty_loss:  # E.g. A = 0: the KL's gradient leads back to the old policy.
        assert advantage > 0 or ((gradient * sign) > 0).all()
    elif policy_loss is cispo.policy_loss:  # -clip(rho, 0, 5) A, at most 5
        near(gradient, [[-5.0 * advantage * (sign > 0)] * 2])
    elif advantage < 0 < sign:  # what is bad and far too likely: descent makes it less so
        assert (gradient > 0).all()
    else:  # clipped at 1.2 or at 0.8, and else the ratio or A is 0
        near(loss, [[{(1, 1): -1.2, (-1, -1): 0.8}.get((advantage, sign), 0.0)] * 2])
        assert not gradient.any()


# ------------------------------------------ Aggregation -----------------------------------------
def test_aggregations():
    # Sums 14 and 19: 33 / 2; means 2.8 and 1.9: 4.7 / 2; 33 / 15 tokens; 33 / (2 * 10).
    rows = [torch.tensor([1.0] * 4 + [10.0]), torch.tensor([1.0] * 9 + [10.0])]
    losses = torch.nn.functional.pad(pad_sequence(rows, batch_first=True), (1, 3))
    mask = losses != 0  # not the prompt, nor the padding
    for how, value in zip(HOWS, (16.5, 2.35, 2.2, 1.65), strict=True):
        weights = grpo.loss_weights(mask, how, 10)
        assert weights.shape == mask.shape and not weights[~mask].any()
        assert (losses * weights).sum().item() == pytest.approx(value, abs=1e-6)
        assert not grpo.loss_weights(mask & False, how, 10).any()  # and not 0 / 0


def test_the_aggregation_is_the_papers_by_default():
    assert reinforce.Args().loss_aggregation == rloo.Args().loss_aggregation == "sequence-sum"
    assert ppo.Args().loss_aggregation == grpo.Args().loss_aggregation == "sequence-mean"
    assert cispo.Args().loss_aggregation == "token-mean"
    assert not hasattr(gspo.Args(), "loss_aggregation")  # with another it is not its formula


# -------------------------------------------- Updates -------------------------------------------
# The last group is uniform. Not centred, so that the loss is not 0.
ADVANTAGES = torch.tensor([[2.0], [1.0], [-1.0], [3.0], [1.5], [-0.5], [2.0], [-1.0]] + [[0.0]] * 4)


def arguments(script, **flags):
    """Of one update, whose gradient has any norm."""
    own = {} if script in (reinforce, rloo) else {"minibatches": 1}
    return script.Args(max_grad_norm=1e9, max_completion_tokens=32, **own, **flags)


updating = pytest.mark.parametrize("script", [grpo, rloo, reinforce], ids=lambda s: s.SCRIPT)


@updating
@pytest.mark.parametrize("how", HOWS)
def test_the_gradient_is_the_formulas_whatever_the_micro_batches(
    one_process, tiny_model, script, how
):
    # The whole batch in one plain forward pass, uniform rows included, at ratio 1.
    batch = make_batch(tiny_model, ADVANTAGES)
    logprobs, _ = naive(tiny_model, batch["input_ids"], batch["mask"])
    weights = script.loss_weights(batch["mask"], how, 32)
    expected = flat_gradient(tiny_model, -(ADVANTAGES * logprobs * weights).sum())
    assert expected.norm() > 0.1  # or the comparison would say little
    factor = 1 if script is grpo else logprobs  # GRPO's loss is -A rho, and theirs -A logp
    loss = -(ADVANTAGES * factor * weights).sum().item()
    wide = {name: torch.nn.functional.pad(value, (0, 10)) for name, value in batch.items()}
    wide["advantages"] = ADVANTAGES
    runs = [(batch, 1, [1] * 8), (batch, 3, [3, 3, 2]), (batch, 100, [8]), (wide, 3, [3, 3, 2])]
    for given, size, sizes in runs:
        recorder, flags = Recorder(tiny_model), {"micro_batch_size": size, "loss_aggregation": how}
        with mock.patch.object(common, "token_logprobs", wraps=common.token_logprobs) as passes:
            metrics = script.update(tiny_model, recorder, dict(given), arguments(script, **flags))
        near(recorder.gradients[0] / expected.norm(), expected / expected.norm())
        # None for the four rows that have no advantage.
        assert [len(call.args[1]) for call in passes.call_args_list] == sizes
        assert metrics["policy/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-4)


@updating
def test_without_any_advantage_momentum_alone_moves_the_weights(one_process, tiny_model, script):
    batch = make_batch(tiny_model, ADVANTAGES)
    optimizer = script.make_optimizer(tiny_model)
    script.update(tiny_model, optimizer, batch, arguments(script))  # at a learning rate of 0
    before = parameters_to_vector(tiny_model.parameters())
    batch["advantages"], optimizer.param_groups[0]["lr"] = torch.zeros(12, 1), 1e-3
    metrics = script.update(tiny_model, optimizer, batch, arguments(script))
    assert metrics["policy/grad_norm"] == metrics["loss/policy"] == 0.0
    assert (parameters_to_vector(tiny_model.parameters()) - before).norm() > 0.01
    # A weight without a gradient, and not one of 0, would be left out.
    assert {state["step"].item() for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("script", [reinforce, rloo, grpo, gspo, cispo], ids=lambda s: s.SCRIPT)
def test_metrics_are_sums_over_the_processes(one_process, tiny_model, script, monkeypatch):
    # As if a second process found in its half of the rows what this one finds in its own.
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(script.dist, "all_reduce", lambda totals: totals.mul_(2))
    recorder, batch = Recorder(tiny_model), make_batch(tiny_model, ADVANTAGES)
    metrics = script.update(tiny_model, recorder, batch, arguments(script))
    norm = recorder.gradients[0].norm().item()
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_micro_batches_are_the_rows_without_needless_columns(one_process, tiny_model, size):
    batch, asked = make_batch(tiny_model, ADVANTAGES), torch.tensor([11, 2, 5, 0, 7])
    parts = list(grpo.micro_batches(batch, asked, size, torch.device("cpu")))
    for rows, part in parts:
        width = part["mask"].shape[1]
        assert len(rows) <= size and part["mask"][:, -1].any()
        assert torch.equal(part["input_ids"], batch["input_ids"][rows, : width + 1])
        assert torch.equal(part["mask"], batch["mask"][rows, :width])
        assert torch.equal(part["advantages"], ADVANTAGES[rows])
        assert not batch["mask"][rows, width:].any()  # no token was cut off
    assert torch.equal(torch.cat([rows for rows, _ in parts]).sort()[0], asked.sort()[0])


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_checkpointing_switches_no_router_noise_on(one_process, family):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 86}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    sizes |= {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5, "attention_dropout": 0.5}
    config = AutoConfig.for_model(family, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids, mask = torch.arange(24).view(2, 12), torch.ones(2, 11, dtype=torch.bool)
    before, _ = common.token_logprobs(model.eval(), ids, mask)
    model = grpo.shard(model, torch.device("cpu"), torch.float32, checkpointing=True)
    for _ in range(2):
        near(common.token_logprobs(model, ids, mask)[0], before, atol=1e-6)
