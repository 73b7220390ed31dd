"""`GRPO()` through our trainer equals TRL, and what we touch of TRL is where we left it."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from _training import (
    Recorder,
    StockRecorder,
    equal_weights,
    even_digits,
    make_args,
    make_trainer,
    short_or_none,
    weights,
)
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from grpo_ext.advantages import GRPO
from grpo_ext.statistics import batch_std, group_std


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_grpo_equals_trl_bit_for_bit(tmp_path, scale_rewards, aggregation):
    settings = {"scale_rewards": scale_rewards, "multi_objective_aggregation": aggregation}
    settings |= {"reward_weights": [1.0, 0.5], "compact_updates": False}
    runs = []
    for trainer_class in (StockRecorder, Recorder):
        args = make_args(tmp_path, **settings)
        rewards = [even_digits, short_or_none]
        runs.append(make_trainer(args, rewards, trainer_class))
        runs[-1].train()
    stock, ours = runs
    assert len(stock.recorded) == len(ours.recorded) == 3
    assert any(advantages.abs().sum() > 0 for advantages in stock.recorded)
    for expected, found in zip(stock.recorded, ours.recorded, strict=True):
        assert torch.equal(expected, found)
    assert equal_weights(weights(stock), weights(ours))
    assert list(stock._logs["advantages"]) == list(ours._logs["advantages"])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_grpo_equals_trl_with_unscorable_rows(tmp_path, scale_rewards):
    runs = []
    for trainer_class in (StockRecorder, Recorder):
        args = make_args(tmp_path, scale_rewards=scale_rewards, compact_updates=False)
        runs.append(make_trainer(args, short_or_none, trainer_class))
        runs[-1].train()
    stock, ours = runs
    assert any(torch.isnan(torch.tensor(list(stock._logs["rewards"]["short_or_none"]))))
    assert all(torch.equal(a, b) for a, b in zip(stock.recorded, ours.recorded, strict=True))
    assert equal_weights(weights(stock), weights(ours))


def test_another_formula_is_not_equal(tmp_path):
    """The comparison above can fail: the population standard deviation changes advantages and weights."""
    runs = []
    for trainer_class, kwargs in ((StockRecorder, {}), (Recorder, {"advantage_estimator": GRPO(std_ddof=0)})):
        args = make_args(tmp_path, compact_updates=False)
        runs.append(make_trainer(args, even_digits, trainer_class, **kwargs))
        runs[-1].train()
    stock, ours = runs
    assert not all(torch.equal(a, b) for a, b in zip(stock.recorded, ours.recorded, strict=True))
    assert not equal_weights(weights(stock), weights(ours))


@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (64, 16), (1024, 16)])
def test_standard_deviations_are_trls_to_the_last_bit(shape):
    rewards_PG = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 7 - 2
    rewards_PG[rewards_PG > 4] = torch.nan
    rewards_PG[0, :2] = torch.tensor([0.1, 0.7])
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(group_std(rewards_PG), nanstd(rewards_PG, dim=1, keepdim=True), **same)
    torch.testing.assert_close(batch_std(rewards_PG).squeeze(), nanstd(rewards_PG.flatten()), **same)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_generate", ["self", "prompts"]),
        ("_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        ("_generate_and_score_completions", ["self", "inputs"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_compute_loss", ["self", "model", "inputs"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_get_output_dir", ["self", "trial"]),
    ],
)
def test_trl_has_the_methods_we_wrap(method, parameters):
    assert list(inspect.signature(getattr(GRPOTrainer, method)).parameters) == parameters


def test_trl_computes_log_probs_from_what_we_pass():
    """TRL 1.14.2 takes positions without names."""
    signature = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    bound = signature.bind(None, "model", "input_ids", "attention_mask", 8, batch_size=4, compute_entropy=True)
    assert (bound.arguments["model"], bound.arguments["batch_size"]) == ("model", 4)


def test_transformers_has_what_saves_on_sigterm(tmp_path):
    trainer = make_trainer(make_args(tmp_path, enable_jit_checkpoint=True), trainer_class=StockRecorder)
    callback = trainer.pop_callback(JITCheckpointCallback)
    assert callback.jit_manager.trainer is trainer
    assert callback.jit_manager.is_checkpoint_requested is False
    callback.on_train_end(None, None, None)


def test_trl_has_no_hook_of_our_name():
    """The day TRL adds `_compute_advantages`, this says so."""
    assert not hasattr(GRPOTrainer, "_compute_advantages")


def test_trl_has_the_keys_we_touch(tmp_path):
    trainer = make_trainer(make_args(tmp_path, max_steps=1, beta=0.1), trainer_class=StockRecorder)
    trainer.train()
    names = "accelerator args state _step _metrics _logs loss_type beta num_iterations num_generations "
    names += "num_generations_eval reward_weights reward_func_names callback_handler "
    names += "_buffered_inputs importance_sampling_level top_entropy_quantile _tokenizer"
    assert [name for name in names.split() if not hasattr(trainer, name)] == []
    batch = trainer._buffered_inputs[0]
    rows = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "ref_per_token_logps"}
    assert rows | {"num_items_in_batch"} <= set(batch)
    assert batch["num_items_in_batch"].dim() == 0
    assert {"advantages", "rewards"} <= set(trainer._logs)
    assert {"train", "eval"} <= set(trainer._metrics)


def test_the_range_of_versions_is_stated_once():
    """README and `make test-versions` name pyproject's range: from its lower bound to the version the tests use."""
    root = Path(__file__).parents[1]
    (supported,) = re.findall(r'"trl(>=[^"]*)"', (root / "pyproject.toml").read_text())
    (pinned,) = re.findall(r"^trl==(.*)", (root / "constraints.txt").read_text(), flags=re.MULTILINE)
    (line,) = re.findall(r"^TRL_VERSIONS := (.*)", (root / "Makefile").read_text(), flags=re.MULTILINE)
    readme, versions = " ".join((root / "README.md").read_text().split()), line.split()
    assert f"`trl{supported}`" in readme
    assert f"TRL {', '.join(versions[:-1])} and {versions[-1]}." in readme
    assert Version(versions[0]) == Version(supported.removeprefix(">=").split(",")[0] + ".0")
    assert versions[-1] == pinned
    assert len(versions) == 4
    assert all(Version(version) in SpecifierSet(supported) for version in versions)
