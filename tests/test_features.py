"""Every feature of TRL that reaches our seam, with us: `GRPO()` still equals TRL, and a row can be left out."""

from dataclasses import fields
from functools import partial

import pytest
import torch
import trl
from _features import IMAGE_TOKENS, engine, environment, images, lora, rollouts, tools, trained_adapter
from _training import (
    DATA,
    Recorder,
    StockRecorder,
    equal_weights,
    even_digits,
    loss_mask,
    make_args,
    short_or_none,
    weights,
)
from packaging.version import Version
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.advantages import GRPO, HADW, MCGRPO
from grpo_ext.batching import ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES
from grpo_ext.testbed import POLICY_PATH

KNOWN_SETTINGS = {field.name for field in fields(GRPOConfig)}
LOSSES = ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES
REUSE = {"num_iterations": 2}
LUSPO_READS_PADDING = Version(trl.__version__) < Version("1.10")
COUNTS_TRUNCATED_ROWS = Version(trl.__version__) < Version("1.10")  # in the token count that dapo divides by


def nothing(monkeypatch):
    return {}


def two_rewards(monkeypatch):
    return {"reward_funcs": [even_digits, short_or_none]}


def awaited_reward(monkeypatch):
    async def even_digits_later(completions, **kwargs):
        return even_digits(completions)

    return {"reward_funcs": [even_digits_later]}


def streamed_rows(monkeypatch):
    if not hasattr(grpo_trainer, "repeat_iterable_dataset"):
        pytest.skip("this version of TRL takes no iterable data set")
    return {"train_dataset": DATA.to_iterable_dataset()}


def level(loss_type):
    return {"importance_sampling_level": "sequence" if loss_type == "luspo" else "token"}


WEIGHTED = {"reward_weights": [1.0, 0.5], "success_reward": "even_digits"}
TOOLS = {"max_completion_length": 200}
OFF_POLICY = {"off_policy_mask_threshold": 0.1}
VLLM = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
FEATURES = {
    **{f"loss_type={name}": ({"loss_type": name, **level(name), **REUSE}, nothing) for name in LOSSES},
    "num_iterations=3": ({"num_iterations": 3, "max_steps": 4}, nothing),
    "steps_per_generation=1": ({"steps_per_generation": 1, "per_device_train_batch_size": 16}, nothing),
    "steps_per_generation=4": ({"steps_per_generation": 4, "max_steps": 4}, nothing),
    "sequence level": ({"importance_sampling_level": "sequence", "loss_type": "grpo", **REUSE}, nothing),
    "beta, dapo": ({"beta": 0.1, **REUSE}, nothing),
    "beta, grpo": ({"beta": 0.1, "loss_type": "grpo", **REUSE}, nothing),
    "mask_truncated_completions": ({"mask_truncated_completions": True, "max_completion_length": 16}, nothing),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.4}, nothing),
    "delta": ({"delta": 1.05, **REUSE}, nothing),
    "off_policy_mask_threshold": ({"off_policy_mask_threshold": 1e-4, **REUSE}, nothing),
    "entropy_coef": ({"entropy_coef": 0.01}, nothing),
    "use_adaptive_entropy": ({"use_adaptive_entropy": True, "entropy_target": 3.0}, nothing),
    "reward_weights": (WEIGHTED, two_rewards),
    "asynchronous reward": ({}, awaited_reward),
    "iterable data set": ({}, streamed_rows),
    "rollout_func": ({}, partial(rollouts, has_logprobs=False, has_mask=False)),
    "rollout_func, logprobs": (OFF_POLICY, partial(rollouts, has_logprobs=True, has_mask=False)),
    "rollout_func, env_mask": ({}, partial(rollouts, has_logprobs=False, has_mask=True)),
    "rollout_func, both": (OFF_POLICY, partial(rollouts, has_logprobs=True, has_mask=True)),
    "use_vllm, colocate": (VLLM | {"vllm_mode": "colocate"}, engine),
    "use_vllm, server": (VLLM | {"vllm_mode": "server"}, engine),
    "use_vllm, vespo": (VLLM | {"loss_type": "vespo"}, engine),
    "tools": (TOOLS, tools),
    "environment_factory": (TOOLS, environment),
    "images": ({"generation_kwargs": {"suppress_tokens": list(IMAGE_TOKENS.values())}}, images),
    "peft_config": ({}, lora),
    "peft_config, beta": ({"beta": 0.1, **REUSE}, lora),
    "peft model, beta": ({"beta": 0.1, **REUSE}, trained_adapter),
}
every_feature = pytest.mark.parametrize("feature", FEATURES)


def build(tmp_path, monkeypatch, feature, trainer_class=Recorder, estimator=None, **more):
    """A trainer that uses the feature; with an estimator, one of its extra completions per group as well."""
    settings, make = FEATURES[feature]
    missing = sorted(settings.keys() - KNOWN_SETTINGS - {"success_reward"})
    if missing:
        pytest.skip(f"this version of TRL has no {', '.join(missing)}")
    settings = {"max_steps": 2, "temperature": 3.0, "compact_updates": False, **settings, **more}
    kwargs = make(monkeypatch)
    if estimator is not None:
        extra = estimator.num_extra_generations
        size = settings.pop("per_device_train_batch_size", 8) // 4 * (4 + extra)
        settings |= {"num_extra_generations": extra, "per_device_train_batch_size": size}
        kwargs["advantage_estimator"] = estimator
    defaults = {"model": str(POLICY_PATH), "reward_funcs": [even_digits], "train_dataset": DATA}
    return trainer_class(args=make_args(tmp_path, **settings), **defaults | kwargs)


def train(trainer):
    """Trains, and asserts that the weights moved."""
    start = {name: value.clone() for name, value in weights(trainer).items()}
    trainer.train()
    assert not equal_weights(start, weights(trainer))
    return trainer


def assert_same_training(stock, ours):
    """Same advantages at every generated batch, not all zero, and the same weights, bit for bit."""
    assert any(advantages.any() for advantages in stock.recorded)
    for expected, found in zip(stock.recorded, ours.recorded, strict=True):
        assert torch.equal(expected, found)
    assert equal_weights(weights(stock), weights(ours))


@every_feature
def test_grpo_equals_trl(tmp_path, monkeypatch, feature):
    stock = train(build(tmp_path, monkeypatch, feature, StockRecorder))
    assert_same_training(stock, train(build(tmp_path, monkeypatch, feature)))


@every_feature
def test_compact_updates_equal_trl_but_for_the_order_of_sums(tmp_path, monkeypatch, feature):
    """Same advantages bit for bit; weights, moved by the plain gradient, as far as float32 adds up alike."""
    plain = {"adam_epsilon": 1.0, "learning_rate": 0.5, "max_grad_norm": 0.0, "compact_updates": None}
    stock = train(build(tmp_path, monkeypatch, feature, StockRecorder, **plain))
    ours = build(tmp_path, monkeypatch, feature, **plain)
    start = {name: value.clone() for name, value in weights(ours).items()}
    train(ours)
    for expected, found in zip(stock.recorded, ours.recorded, strict=True):
        assert torch.equal(expected, found)
    moved = {name: (value - start[name]).abs().max() for name, value in weights(stock).items()}
    differs = {name: (value - weights(ours)[name]).abs().max() for name, value in weights(stock).items()}
    assert max(differs.values()) <= 1e-5 * max(moved.values()) + 2**-22  # of weights up to 1
    is_compact = any("compact/live_rows" in log for log in ours.state.log_history)
    assert is_compact == (feature != "images" and not (feature == "loss_type=luspo" and LUSPO_READS_PADDING))


def watch(trainer):
    """Every generated batch, and every micro-batch with its loss, as lists that fill during training."""
    generated, losses = [], []
    generate, compute = trainer._generate_and_score_completions, trainer._compute_loss

    def generate_and_keep(inputs):
        generated.append(generate(inputs))
        return generated[-1]

    def compute_and_keep(model, inputs):
        losses.append((inputs, compute(model, inputs)))
        return losses[-1][1]

    trainer._generate_and_score_completions, trainer._compute_loss = generate_and_keep, compute_and_keep
    return generated, losses


@every_feature
def test_state_moves_once_per_batch_and_pivots_leave_the_loss(tmp_path, monkeypatch, feature):
    trainer = build(tmp_path, monkeypatch, feature, AdvantageGRPOTrainer, HADW(base=MCGRPO()))
    generated, losses = watch(trainer)
    train(trainer)
    num_micro_steps = trainer.args.max_steps * trainer.args.gradient_accumulation_steps
    assert len(losses) == num_micro_steps
    assert len(generated) == -(-num_micro_steps // (trainer.args.steps_per_generation * trainer.num_iterations))
    assert len(trainer.advantage_estimator.anchor.accuracies) == len(generated)
    num_groups = trainer.args.generation_batch_size // 5
    rows = [log["excluded/rows"] for log in trainer.state.log_history if "excluded/rows" in log]
    assert set(rows) == {num_groups}
    for batch in generated:
        is_out = (loss_mask(batch) == 0).all(dim=1)
        num_out = is_out.view(num_groups, 5).sum(dim=1)
        assert (num_out >= 1).all() if trainer.mask_truncated_completions else (num_out == 1).all()
        if not (trainer.mask_truncated_completions and COUNTS_TRUNCATED_ROWS):
            assert batch["num_items_in_batch"] == loss_mask(batch).sum()
    assert all(loss.isfinite() for _, loss in losses)
    assert sum((loss_mask(inputs) == 0).all(dim=1).sum() for inputs, _ in losses) >= num_groups


@pytest.mark.parametrize("feature", ["use_vllm, colocate", "tools", "images", "peft_config"])
def test_another_formula_is_not_equal(tmp_path, monkeypatch, feature):
    """The comparison with TRL can fail: the population standard deviation changes advantages and weights."""
    stock = train(build(tmp_path, monkeypatch, feature, StockRecorder))
    ours = train(build(tmp_path, monkeypatch, feature, estimator=GRPO(std_ddof=0)))
    with pytest.raises(AssertionError):
        assert_same_training(stock, ours)
    assert not torch.equal(stock.recorded[0], ours.recorded[0])


@pytest.mark.parametrize("loss_type", ROW_MEAN_LOSSES)
def test_row_means_beside_an_entropy_bonus_refuse_the_pivot(tmp_path, monkeypatch, loss_type):
    settings = {"loss_type": loss_type, **level(loss_type)}
    trainer = build(tmp_path, monkeypatch, "entropy_coef", AdvantageGRPOTrainer, HADW(base=MCGRPO()), **settings)
    with pytest.raises(ValueError, match="entropy bonus"):
        trainer.train()


def test_aggregations_that_the_estimator_cannot_honour_are_refused(tmp_path, monkeypatch):
    settings = {"multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(ValueError, match="multi_objective_aggregation"):
        build(tmp_path, monkeypatch, "reward_weights", AdvantageGRPOTrainer, HADW(base=MCGRPO()), **settings)


def test_normalize_then_sum_trains_with_state(tmp_path, monkeypatch):
    settings = {"multi_objective_aggregation": "normalize_then_sum"}
    trainer = train(build(tmp_path, monkeypatch, "reward_weights", estimator=HADW(), **settings))
    assert len(trainer.advantage_estimator.anchor.accuracies) == len(trainer.recorded) == 2


def evaluate(trainer, num_rows=8):
    """Evaluation metrics on the first rows of the training data, without the timings."""
    metrics = trainer.evaluate(trainer.train_dataset.select(range(num_rows)))
    return {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second", "time"))}


evaluated_features = pytest.mark.parametrize("feature", ["use_vllm, server", "images", "tools", "rollout_func, both"])


@evaluated_features
@pytest.mark.parametrize("num_generations", [1, 2])
def test_evaluation_equals_trl_with_its_own_number_of_generations(tmp_path, monkeypatch, feature, num_generations):
    settings = {"num_generations_eval": num_generations, "per_device_eval_batch_size": 8}
    stock = build(tmp_path, monkeypatch, feature, StockRecorder, **settings)
    expected = evaluate(stock)
    ours = build(tmp_path, monkeypatch, feature, **settings)
    found = evaluate(ours)
    assert expected == {name: found[name] for name in expected}
    assert len(stock.recorded) == len(ours.recorded) == num_generations
    assert all(torch.equal(first, second) for first, second in zip(stock.recorded, ours.recorded, strict=True))
    assert any(advantages.any() for advantages in stock.recorded) == (num_generations > 1)


@evaluated_features
@pytest.mark.parametrize("num_generations", [None, 2, 1])
def test_evaluation_leaves_state_and_rows_alone(tmp_path, monkeypatch, feature, num_generations):
    """With a pivot in training, evaluation samples what the user asked for, and nothing is left out of its loss."""
    settings = {"num_generations_eval": num_generations, "per_device_eval_batch_size": 8}
    trainer = build(tmp_path, monkeypatch, feature, AdvantageGRPOTrainer, HADW(base=MCGRPO()), max_steps=1, **settings)
    train(trainer)
    before = trainer.advantage_estimator.state_dict(), trainer.collapse_history.state_dict()
    generated, losses = watch(trainer)
    metrics = evaluate(trainer)
    assert (trainer.advantage_estimator.state_dict(), trainer.collapse_history.state_dict()) == before
    assert len(generated) == (num_generations or 4)
    assert all((loss_mask(batch) > 0).any(dim=1).all() for batch in generated)
    assert all(loss.isfinite() for _, loss in losses)
    assert {"eval_acr/rate", "eval_ha_dw/batch_accuracy", "eval_reward"} <= metrics.keys()
    assert "eval_excluded/rows" not in metrics
    assert metrics["eval_ha_dw/batch_accuracy"] == pytest.approx(metrics["eval_reward"])


def test_tool_results_reach_neither_the_loss_nor_its_token_count(tmp_path, monkeypatch):
    trainer = build(tmp_path, monkeypatch, "tools", AdvantageGRPOTrainer, HADW(base=MCGRPO()))
    generated, losses = watch(trainer)
    train(trainer)
    for batch in generated:
        is_kept = loss_mask(batch).any(dim=1)
        is_outside = (batch["tool_mask"] == 0) & (batch["completion_mask"] == 1)
        assert 0 < is_outside[is_kept].any(dim=1).sum() < is_kept.sum()
        assert not batch["tool_mask"][~is_kept].any()
        assert batch["num_items_in_batch"] == (batch["completion_mask"].bool() & ~is_outside)[is_kept].sum()
    assert all("tool_mask" in inputs for inputs, _ in losses)
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_nothing_of_an_excluded_row_moves_the_gradient(tmp_path, monkeypatch, loss_type):
    """Neither its image, nor its answer, nor its advantage; a row that stays does."""
    trainer = build(tmp_path, monkeypatch, "images", AdvantageGRPOTrainer, HADW(base=MCGRPO()), loss_type=loss_type)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = [row for row in trainer.train_dataset.select(range(4)) for _ in range(5)]
    batch = trainer._generate_and_score_completions(inputs)
    is_out = (loss_mask(batch) == 0).all(dim=1)
    assert is_out.sum() == 4

    def gradient(rows):
        num_patches = batch["image_grid_thw"].prod(dim=1)
        is_patch = rows.repeat_interleave(num_patches)
        changed = dict(batch)
        changed["pixel_values"] = batch["pixel_values"].masked_fill(is_patch.unsqueeze(1), 0.3)
        changed["completion_ids"] = batch["completion_ids"].masked_fill(rows.unsqueeze(1), 5)
        changed["advantages"] = batch["advantages"] + rows
        trainer.model.zero_grad()
        trainer._compute_loss(trainer.model, changed).backward()
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    expected = gradient(torch.zeros_like(is_out))
    tolerance = 1e-6 * expected.abs().max()
    assert (gradient(is_out) - expected).abs().max() <= tolerance
    assert (gradient(~is_out) - expected).abs().max() > 1e3 * tolerance


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_engine_samples_the_extra_completion_and_is_corrected_for(tmp_path, monkeypatch, mode):
    settings = {"vllm_importance_sampling_mode": mode}
    feature = "use_vllm, colocate"
    trainer = build(tmp_path, monkeypatch, feature, AdvantageGRPOTrainer, HADW(base=MCGRPO()), **settings)
    generated, losses = watch(trainer)
    train(trainer)
    assert trainer.vllm_generation.num_syncs == 2
    for batch in generated:
        width = 1 if mode.startswith("sequence") else batch["completion_ids"].size(1)
        assert batch["importance_sampling_ratio"].shape == (20, width)
        assert batch["sampling_per_token_logps"].shape == batch["completion_ids"].shape
    ratios = torch.cat([inputs["importance_sampling_ratio"].flatten() for inputs, _ in losses])
    assert (ratios > 1.05).any()


@pytest.mark.parametrize("feature", ["tools", "rollout_func, env_mask"])
def test_lengths_count_what_the_model_said(tmp_path, monkeypatch, feature):
    """As TRL's own completion lengths do; tokens of tools and environments are not the model's."""
    seen = []

    class Look(GRPO):
        def estimate(self, groups):
            seen.append(groups.lengths_PG.float().mean().item())
            return super().estimate(groups)

    trainer = train(build(tmp_path, monkeypatch, feature, estimator=Look()))
    assert seen == [log["completions/mean_length"] for log in trainer.state.log_history[:2]]


def test_improbable_tokens_of_an_excluded_row_leave_the_loss_finite(tmp_path, monkeypatch):
    """The model still reads an excluded row, so that its log-probs stay those that the ratio is taken from."""
    settings = {"temperature": 0.05, **REUSE}
    feature = "rollout_func, env_mask"
    trainer = build(tmp_path, monkeypatch, feature, AdvantageGRPOTrainer, HADW(base=MCGRPO()), **settings)
    generated, losses = watch(trainer)
    trainer.train()
    is_out = (loss_mask(generated[0]) == 0).all(dim=1)
    assert generated[0]["old_per_token_logps"][is_out].min() < -88
    assert all(loss.isfinite() for _, loss in losses)
