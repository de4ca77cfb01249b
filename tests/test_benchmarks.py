"""The README's memory table is the formula's, which holds for a model that fits here; the table of
variances is of the advantages it names."""

import pytest
import torch
from conftest import ROOT
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import memory, variance


def test_the_memory_table_is_the_formulas():
    assert memory.table() in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("hidden, intermediate, layers", [(128, 384, 3), (256, 512, 2)])
def test_the_formula_is_what_autograd_saves(hidden, intermediate, layers):
    config = Qwen3Config(
        vocab_size=86,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
    )
    model, saved = Qwen3ForCausalLM(config), {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    input_ids = torch.randint(86, (8, 128))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            model.base_model(input_ids=input_ids, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    parts = memory.parts(config, 1, tokens=input_ids.numel())
    # The rest: rotary tables, the norms' one number a token, and the last norm.
    assert measured == pytest.approx(parts["activations"] + parts["casts"], rel=0.1)


def test_the_variance_is_that_of_the_draws():
    # (1, 0) and (3, 0): their mean is (2, 0), the sample variance 2; 2^2 - 2/2 = 3 without bias.
    found = variance.spread(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert found == pytest.approx((2.0, 0.0, 3.0))


def test_the_baselines_are_those_of_the_scripts():
    # Two prompts with two samples each, of 2, 1, 2 and 1 tokens; the critic says 1/4 everywhere.
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]).bool()
    rewards, values = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.full((4, 2), 0.25) * mask
    found = variance.advantages_of(rewards, mask, values, group_size=2)
    expected = {
        "none": [[1, 1], [0, 0], [0, 0], [0, 0]],
        "batch mean": [[0.75, 0.75], [-0.25, 0], [-0.25, -0.25], [-0.25, 0]],  # less 1/4
        "leave-one-out": [[1, 1], [-1, 0], [0, 0], [0, 0]],  # less the other's reward
        "learned (critic)": [[0.75, 0.75], [-0.25, 0], [-0.25, -0.25], [-0.25, 0]],  # less V
        "1": [[1, 1], [1, 0], [1, 1], [1, 0]],
    }
    assert {name: rows.tolist() for name, rows in found.items()} == expected
