"""An update without the rows and the padding that its gradient does not need has TRL's gradient."""

import copy
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import trl
from _compact import (
    NUM_STEPS,
    SHAPE,
    distance,
    gradient,
    make_batch,
    make_compact_trainer,
    make_model,
    split,
    stock_gradient,
)
from _compact_worker import Uneven, length
from _ranks import Ranks
from _training import (
    Recorder,
    StockRecorder,
    equal_weights,
    even_digits,
    make_args,
    make_trainer,
    use_float64,
    weights,
)
from _worker import write
from packaging.version import Version
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update import count_padded

from grpo_ext import AdvantageGRPOConfig, AdvantageGRPOTrainer
from grpo_ext.advantages import GRPO, MCGRPO
from grpo_ext.batching import MICRO_STEP, ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES, find_loss_mask
from grpo_ext.testbed import POLICY_PATH

LOSSES = ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES
LIVE = (0.17, 0.5, 1.0)  # the first has fewer rows than micro-batches
KNOWN_SETTINGS = {field.name for field in fields(GRPOConfig)}
TRL = Version(trl.__version__)
LOSSES = LOSSES if Version("1.10") <= TRL else tuple(loss for loss in LOSSES if loss != "luspo")  # it read padding
every_loss = pytest.mark.parametrize("loss_type", LOSSES)


def move(trainer, seed=7):
    """Another model than the one that sampled, as after an optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def assert_gradient_is_trls(trainer, batch, tolerance, num_steps=NUM_STEPS):
    """Twice on one buffer; gives the micro-batches."""
    stock = split(batch, num_steps)
    found = trainer._compact(stock)
    assert len(found) == len(stock)
    for _ in range(2):
        expected = stock_gradient(trainer, stock)
        assert expected.abs().max() > 0
        assert distance(gradient(trainer, found), expected) <= tolerance
        move(trainer)
    return found


def skip_unknown(settings):
    missing = sorted(settings.keys() - KNOWN_SETTINGS)
    if missing:
        pytest.skip(f"this version of TRL has no {', '.join(missing)}")


@pytest.fixture
def said(monkeypatch):
    """What is said once, each time."""
    lines = []
    monkeypatch.setattr("grpo_ext.compact.logger.warning_once", lines.append)
    return lines


# The gradient


@every_loss
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gradient_is_trls_in_float64(tmp_path, monkeypatch, loss_type, beta):
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, beta=beta)
    use_float64(trainer, monkeypatch)
    for live in LIVE:
        batch = make_batch(trainer, live)
        found = assert_gradient_is_trls(trainer, batch, 1e-12)
        assert count_padded(found) < (0.8 if beta else 0.5 if live < 1 else 0.7) * count_padded(split(batch))


@every_loss
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gradient_is_trls_in_float32(tmp_path, loss_type, beta):
    """With TRL's own head."""
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, beta=beta)
    for live in LIVE:
        assert_gradient_is_trls(trainer, make_batch(trainer, live), 2e-6 if Version("1.15") <= TRL else 5e-6)


@pytest.mark.skipif(Version("1.10") <= TRL, reason="since then luspo does not read padding")
def test_luspo_of_old_is_left_alone(tmp_path, said):
    trainer = make_compact_trainer(tmp_path, loss_type="luspo")
    stock = split(make_batch(trainer, 0.5))
    assert trainer._compact(stock) is stock
    assert "averages over padding" in said[0]


def test_gradient_in_float64_stops_at_the_float32_of_trls_head(tmp_path):
    trainer = make_compact_trainer(tmp_path)
    trainer.model.double()
    assert_gradient_is_trls(trainer, make_batch(trainer, 0.5), 1e-6)


@pytest.mark.parametrize("loss_type", [loss for loss in (*ROW_MEAN_LOSSES, "bnpo") if loss in LOSSES])
def test_rows_dropped_without_their_factor_are_another_gradient(tmp_path, loss_type):
    """The comparison can fail: with half of the rows gone, as if the loss divided by a constant."""
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type)
    stock = split(make_batch(trainer, 0.5))
    expected = stock_gradient(trainer, stock)
    trainer.loss_type = "dapo"
    found = trainer._compact(stock)
    trainer.loss_type = loss_type
    assert gradient(trainer, found).norm() > 1.4 * expected.norm()


def force(trainer, monkeypatch):
    """As if everything were exact."""
    monkeypatch.setattr(trainer, "_limits", lambda: ([], []))


@every_loss
def test_leaving_out_rows_that_the_kl_term_moves_would_be_wrong(tmp_path, monkeypatch, loss_type):
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, beta=0.1)
    assert trainer._limits()[1]
    force(trainer, monkeypatch)
    stock = split(make_batch(trainer, 0.5))
    assert distance(gradient(trainer, trainer._compact(stock)), stock_gradient(trainer, stock)) > 1e-3


def experts():
    """A mixture of experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    heads = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes | tokens | heads))


IN_PLACE = {
    "entropy_coef": ({"entropy_coef": 0.1}, make_model),
    "use_adaptive_entropy": ({"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1}, make_model),
    "top_entropy_quantile": ({"top_entropy_quantile": 0.4}, make_model),
    "auxiliary loss": ({"router_aux_loss_coef": 0.1}, experts),
}
every_place = pytest.mark.parametrize("setting", IN_PLACE)


@every_place
def test_rows_stay_in_place_beside_what_depends_on_the_micro_batch(tmp_path, monkeypatch, setting):
    """Trimming alone is exact there; moving rows would not be."""
    settings, make = IN_PLACE[setting]
    skip_unknown(settings)
    trainer = make_compact_trainer(tmp_path, make(), **settings)
    monkeypatch.setattr(trainer.accelerator.gradient_state, "sync_gradients", False)  # the controller stays put
    trainer._last_world_entropy = 0.0
    batch = make_batch(trainer, 0.5)
    found = assert_gradient_is_trls(trainer, batch, 2e-6)
    assert [len(part["advantages"]) for part in found] == [4] * NUM_STEPS
    assert count_padded(found) < 0.9 * count_padded(split(batch))
    force(trainer, monkeypatch)
    stock = split(batch)
    assert distance(gradient(trainer, trainer._compact(stock)), stock_gradient(trainer, stock)) > 1e-3


def with_tools(trainer, batch):
    generator = torch.Generator().manual_seed(3)
    return {"tool_mask": torch.randint(0, 2, batch["completion_mask"].shape, generator=generator)}


def with_truncated(trainer, batch):
    is_kept = torch.arange(len(batch["advantages"])).remainder(5) > 1
    mask = batch["completion_mask"] * is_kept.unsqueeze(1)
    assert (batch["advantages"][~is_kept] != 0).any()
    return {"completion_mask": mask, "num_items_in_batch": mask.sum()}


def with_token_advantages(trainer, batch):
    generator = torch.Generator().manual_seed(3)
    weights_BT = torch.randn(batch["completion_mask"].shape, generator=generator, dtype=batch["advantages"].dtype)
    return {"advantages": batch["advantages"].unsqueeze(1) * weights_BT}


def with_ratios(trainer, batch, mode):
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.vllm_importance_sampling_mode = mode
    generator = torch.Generator().manual_seed(3)
    ratios = torch.rand(batch["completion_mask"].shape, generator=generator, dtype=batch["advantages"].dtype) + 0.5
    ratios = ratios.masked_fill(batch["completion_mask"] == 0, 1.0)
    ratios = ratios[:, :1] if mode.startswith("sequence") else ratios
    return {"importance_sampling_ratio": ratios, "sampling_per_token_logps": batch["old_per_token_logps"] - 0.1}


def with_nothing(trainer, batch):
    return {}


ROW_LOCAL = {
    "tools": ({}, with_tools),
    "truncated": ({}, with_truncated),
    "token advantages": ({}, with_token_advantages),
    "ratios of tokens": ({}, partial(with_ratios, mode="token_truncate")),
    "ratios of sequences": ({}, partial(with_ratios, mode="sequence_truncate")),
    "delta": ({"delta": 1.5}, with_nothing),
    "off-policy mask": ({"off_policy_mask_threshold": 0.05}, with_nothing),
    "sequence level": ({"importance_sampling_level": "sequence"}, with_nothing),
    "bias-corrected KL": ({"beta": 0.1, "use_bias_correction_kl": True}, with_nothing),
}


@every_loss
@pytest.mark.parametrize("feature", ROW_LOCAL)
def test_gradient_is_trls_with_what_belongs_to_a_row(tmp_path, monkeypatch, feature, loss_type):
    settings, extend = ROW_LOCAL[feature]
    skip_unknown(settings)
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, **settings)
    use_float64(trainer, monkeypatch)
    for live in (0.17, 0.5):
        batch = make_batch(trainer, live)
        batch |= extend(trainer, batch)
        assert_gradient_is_trls(trainer, batch, 1e-12)


def test_log_probs_far_apart_stay_finite(tmp_path):
    """The row that a filler is made of has old log-probs whose ratio overflows; the filler has not."""
    trainer = make_compact_trainer(tmp_path)
    batch = make_batch(trainer, 0.17)
    is_dead = batch["advantages"] == 0
    batch["old_per_token_logps"][is_dead] = -200.0
    for part in trainer._compact(split(batch)):
        assert trainer._compute_loss(trainer.model, part).isfinite()


def test_a_batch_without_advantages_costs_three_tokens_a_step(tmp_path):
    trainer = make_compact_trainer(tmp_path)
    found = trainer._compact(split(make_batch(trainer, 0.0)))
    assert [(part["prompt_ids"].shape, part["completion_ids"].shape) for part in found] == [((1, 1), (1, 2))] * 6
    assert not gradient(trainer, found).any()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


# Several ranks, as threads


def compact_on_ranks(trainer, stocks):
    """What `_compact` gives on each rank, and the metrics there."""
    ranks = Ranks(len(stocks))

    def compact(rank):
        own = copy.copy(trainer)
        own.accelerator = SimpleNamespace(
            process_index=rank,
            num_processes=len(stocks),
            device=torch.device("cpu"),
            gather=lambda tensor: ranks.gather(rank, tensor),
        )
        own._metrics = {"train": defaultdict(list)}
        return own._compact(stocks[rank]), own._metrics["train"]

    with ThreadPoolExecutor(len(stocks)) as pool:
        return list(zip(*pool.map(compact, range(len(stocks))), strict=True))


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("feature", ["nothing", "tools", "token advantages", "ratios of tokens", "ratios of sequences"])
@pytest.mark.parametrize("loss_type", sorted({"bnpo", "dapo", "vespo", "grpo"}))
def test_gradient_over_ranks_is_trls(tmp_path, monkeypatch, loss_type, feature, exchange):
    """The sum over two ranks, of 5 and 18 live rows, of other widths."""
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, exchange_rows=exchange)
    use_float64(trainer, monkeypatch)
    stocks = []
    for rank, live in enumerate((0.2, 0.75)):
        batch = make_batch(trainer, live, seed=rank, shape=replace(SHAPE, cap=(6, 24)[rank]))
        batch |= {"nothing": (None, with_nothing)}.get(feature, ROW_LOCAL.get(feature))[1](trainer, batch)
        batch["num_items_in_batch"] = torch.tensor(400)
        stocks.append(split(batch))
    found, metrics = compact_on_ranks(trainer, stocks)
    assert metrics[0] == metrics[1]
    assert ("compact/exchanged_bytes" in metrics[0]) == exchange
    if exchange and feature == "nothing":  # of the rank with more rows, twice: ids 4 bytes, masks 1, the rest 8
        num_rows = max(sum(int(part["advantages"].count_nonzero()) for part in stock) for stock in stocks)
        prompt, completion = (
            max(stock[0][f"{name}_ids"].size(1) for stock in stocks) for name in ("prompt", "completion")
        )
        num_bytes = prompt * 5 + completion * (5 + 8 + 8) + 8
        assert metrics[0]["compact/exchanged_bytes"] == [2 * num_rows * num_bytes]
    for first, second in zip(*found, strict=True):
        assert first[MICRO_STEP] == second[MICRO_STEP]
        assert len(first["advantages"]) == len(second["advantages"])
    expected = sum(stock_gradient(trainer, stock) for stock in stocks)
    assert distance(sum(gradient(trainer, part) for part in found), expected) <= 1e-12
    if exchange:
        live = [sum(int(part["advantages"].ne(0).any(-1).sum()) for part in parts) for parts in found]
        assert abs(live[0] - live[1]) <= 1 or feature == "tools"


@pytest.mark.parametrize("extra", [{"pixel_values": torch.ones(24, 3)}, {"notes": ["a"] * 24}, {"short": True}])
def test_what_only_one_rank_has_stops_all(tmp_path, said, extra):
    """Unknown tensors leave every rank's batch as it is; lists, or completions of one token, rows on their rank."""
    trainer = make_compact_trainer(tmp_path, exchange_rows=True)
    batches = [make_batch(trainer, live, seed=rank) for rank, live in enumerate((0.2, 0.75))]
    if extra.pop("short", False):
        wide = {name: value[:, :1] for name, value in batches[1].items() if value.dim() > 1 and "prompt" not in name}
        batches[1] |= wide
    batches[1] |= extra
    stocks = [split(batch) for batch in batches]
    found, metrics = compact_on_ranks(trainer, stocks)
    assert len(said) >= 1
    if "pixel_values" in extra:
        assert found[0] is stocks[0]
        assert found[1] is stocks[1]
        return
    assert metrics[0]["compact/exchanged_bytes"] == [0.0]
    assert sum(len(part["advantages"]) for part in found[0]) < 24
    for rank, parts in enumerate(found):
        kept = torch.cat([part["advantages"][part["advantages"] != 0] for part in parts])
        own = batches[rank]["advantages"]
        assert sorted(kept.tolist()) == sorted(own[own != 0].tolist())


# Windows


@pytest.mark.parametrize(
    ("steps_per_generation", "accumulation", "windows"),
    [(6, 6, [6]), (6, 3, [3, 3]), (6, 2, [2, 2, 2]), (3, 6, [3]), (6, 1, [1] * 6), (4, 6, None)],
)
def test_rows_move_within_an_optimizer_step_only(tmp_path, steps_per_generation, accumulation, windows):
    trainer = make_compact_trainer(
        tmp_path, steps_per_generation=steps_per_generation, gradient_accumulation_steps=accumulation
    )
    stock = split(make_batch(trainer, 0.5), steps_per_generation)
    for number, batch in enumerate(stock):
        batch["place"] = torch.full((len(batch["advantages"]),), number)
    found = trainer._compact(stock)
    if windows is None:
        assert [batch["place"].tolist() for batch in found] == [batch["place"].tolist() for batch in stock]
        assert trainer._limits()[0] == ["`steps_per_generation=4`, which 6 steps of accumulation do not fit"]
        return
    start = 0
    for size in windows:
        expected = torch.cat([batch["place"][batch["advantages"] != 0] for batch in stock[start : start + size]])
        inside = torch.cat([batch["place"][batch["advantages"] != 0] for batch in found[start : start + size]])
        assert sorted(inside.tolist()) == sorted(expected.tolist())
        start += size
    for index in range(0, len(stock), max(1, accumulation)):
        part = slice(index, index + accumulation)
        expected = stock_gradient(trainer, stock[part])
        assert (gradient(trainer, found[part]) - expected).abs().max() <= 2e-6 * max(1e-3, expected.abs().max())


# Metrics


def by_row(trainer, stock):
    """Of each row of the step, by TRL's definitions: loss tokens, mean entropy, share of clipped tokens, phi."""
    rows = []
    for batch in stock:
        for i in range(len(batch["advantages"])):
            tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
            one = {name: value[i : i + 1] if value.dim() else value for name, value in tensors.items()}
            trainer._metrics["train"].clear()
            GRPOTrainer._compute_loss(trainer, trainer.model, one)
            figures = {name: values[0] for name, values in trainer._metrics["train"].items()}
            tokens, live = int(find_loss_mask(one).sum()), bool(one["advantages"].ne(0).any())
            rows.append(figures | {"tokens": tokens, "live": live and tokens > 0})
    trainer._metrics["train"].clear()
    return rows


def mean(rows, name, weight=lambda row: row["tokens"]):
    return sum(row[name] * weight(row) for row in rows) / sum(map(weight, rows))


@pytest.mark.parametrize("loss_type", sorted({"dapo", "cispo", "vespo", "luspo"} & set(LOSSES)))
@pytest.mark.parametrize("live", [0.17, 0.5])
def test_metrics_describe_all_rows_or_say_which(tmp_path, loss_type, live):
    trainer = make_compact_trainer(tmp_path, loss_type=loss_type, epsilon=0.03)
    stock = split(make_batch(trainer, live))
    rows = by_row(trainer, stock)
    living = [row for row in rows if row["live"]]
    found = trainer._compact(stock)
    trainer._metrics["train"].clear()
    for batch in found:
        trainer._compute_loss(trainer.model, batch)
    trainer_values = {name: list(values) for name, values in trainer._metrics["train"].items()}
    logged = {name: sum(values) / len(values) for name, values in trainer_values.items()}
    assert logged["entropy_live"] == pytest.approx(mean(living, "entropy"), rel=1e-5)
    assert "entropy" not in logged
    per_row = loss_type == "luspo"
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"):
        assert (name in logged) == (name in rows[0])
        if name in rows[0]:
            expected = mean(rows, name, (lambda row: 1) if per_row else (lambda row: row["tokens"]))
            assert expected > 0 or not name.endswith(("region_mean", "cispo_clip_ratio"))
            assert logged[name] == pytest.approx(expected, rel=1e-5)
    if loss_type == "vespo":
        expected = mean(living, "vespo/phi_seq_mean", lambda row: 1)
        assert logged["vespo/phi_seq_mean_live"] == pytest.approx(expected, rel=1e-5)
    assert not {"clip_ratio/low_min", "clip_ratio/high_max"} & logged.keys()
    if loss_type == "luspo":  # a figure per row, also of a filler
        without = [batch for batch in found if batch[MICRO_STEP].fillers == 0]
        assert len(trainer_values["clip_ratio/high_max_live"]) == len(without)
    if loss_type == "dapo" and Version("1.10") <= TRL:  # before, the least and the largest of the ranks' means
        for name, extreme in (("clip_ratio/low_min", min), ("clip_ratio/high_max", max)):
            expected = [extreme(row[name] for row in by_row(trainer, [batch]) if row["live"]) for batch in found[:4]]
            assert max(expected) > 0
            assert trainer_values[f"{name}_live"][:4] == pytest.approx(expected, rel=1e-5)
            assert len(trainer_values[f"{name}_live"]) == sum(bool(batch["advantages"].any()) for batch in found)


def test_token_advantages_at_the_level_of_sequences_are_averaged_over_tokens(tmp_path):
    trainer = make_compact_trainer(tmp_path, importance_sampling_level="sequence", epsilon=0.03)
    batch = make_batch(trainer, 0.5)
    stock = split(batch | with_token_advantages(trainer, batch))
    expected = mean(by_row(trainer, stock), "clip_ratio/high_mean")
    for part in trainer._compact(stock):
        trainer._compute_loss(trainer.model, part)
    values = trainer._metrics["train"]["clip_ratio/high_mean"]
    assert sum(values) / len(values) == pytest.approx(expected, rel=1e-5)


def test_metrics_beside_a_kl_term_describe_all_rows(tmp_path):
    trainer = make_compact_trainer(tmp_path, beta=0.1)
    batch = make_batch(trainer, 0.5)
    stock = split(batch | with_truncated(trainer, batch))
    rows = by_row(trainer, stock)
    found = trainer._compact(stock)
    assert sum(len(part["advantages"]) for part in found) < 24
    for part in found:
        trainer._compute_loss(trainer.model, part)
    logged = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items()}
    for name in ("kl", "entropy", "clip_ratio/region_mean"):
        assert logged[name] == pytest.approx(mean(rows, name), rel=1e-5)


def test_counts_are_logged(tmp_path):
    """By hand: 4 of 24 rows, the tokens they need, and the padding that went."""
    trainer = make_compact_trainer(tmp_path)
    batch = make_batch(trainer, 0.17)
    is_live = batch["advantages"] != 0
    assert is_live.sum() == 4
    found = trainer._compact(split(batch))
    logged = {name: values for name, values in trainer._metrics["train"].items() if name.startswith("compact/")}
    needed = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1))[is_live].sum().item()
    padded = count_padded(found)
    assert logged == {
        "compact/live_rows": [4.0],
        "compact/live_tokens": [needed],
        "compact/padded_tokens": [padded],
        "compact/padded_tokens_saved": [batch["prompt_ids"].numel() + batch["completion_ids"].numel() - padded],
        "compact/rank_imbalance": [1.0],
    }
    assert padded == needed + 2 * 3  # each row alone, and two fillers


# Training


def test_training_ends_where_trls_does_and_logs_as_many_tokens(tmp_path):
    """A run that samples for itself: same advantages bit for bit, and weights but for the order of sums."""
    plain = {"adam_epsilon": 1.0, "learning_rate": 0.3, "max_grad_norm": 0.0, "max_steps": 4, "num_iterations": 2}
    plain |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    stock = make_trainer(make_args(tmp_path, **plain), even_digits, StockRecorder)
    start = {name: value.clone() for name, value in weights(stock).items()}
    stock.train()
    ours = make_trainer(make_args(tmp_path, **plain), even_digits, Recorder)
    ours.train()
    assert all(torch.equal(*pair) for pair in zip(stock.recorded, ours.recorded, strict=True))
    moved = max((value - start[name]).abs().max() for name, value in weights(stock).items())
    differs = max((value - weights(ours)[name]).abs().max() for name, value in weights(stock).items())
    assert differs <= 1e-5 * moved
    for expected, found in zip(stock.state.log_history, ours.state.log_history, strict=True):
        for name in {"num_tokens", "loss", "grad_norm", "completions/mean_length", "reward", "epoch"} & expected.keys():
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    assert any(log["compact/live_rows"] < 16 for log in ours.state.log_history if "compact/live_rows" in log)


def train_on_recorded_rollouts(folder, monkeypatch, precision, **settings):
    """200 optimizer steps whose completions are a function of the prompt; gives the weights in float64."""
    sizes = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    plain = {"adam_epsilon": 1.0, "learning_rate": 0.01, "max_grad_norm": 0.0, "max_steps": 200}
    args = make_args(folder, **sizes, **plain, **settings)
    trainer = make_trainer(args, length, advantage_estimator=Uneven(), rollout_func=write)
    if precision == "float64":
        use_float64(trainer, monkeypatch)
    trainer.train()
    return {name: value.double() for name, value in weights(trainer).items()}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-9), ("float32", 0.1)])
def test_two_hundred_steps_on_recorded_rollouts_end_at_the_same_weights(tmp_path, monkeypatch, precision, tolerance):
    """Relative to how far the weights moved; found 7e-12 and 0.019: a run this long magnifies rounding."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    settings = ({"compact_updates": False}, {})
    stock, found = (train_on_recorded_rollouts(tmp_path, monkeypatch, precision, **each) for each in settings)
    start = LlamaForCausalLM.from_pretrained(str(POLICY_PATH)).state_dict()
    moved = max((value - start[name].double()).abs().max().item() for name, value in stock.items())
    differs = max((value - found[name]).abs().max().item() for name, value in stock.items())
    assert moved > 1e-2
    assert differs <= tolerance * moved


def test_the_generator_is_where_trl_leaves_it(tmp_path):
    """So that the next completions are the same."""
    states = []
    for trainer_class in (GRPOTrainer, AdvantageGRPOTrainer):
        trainer = make_trainer(make_args(tmp_path), trainer_class=trainer_class)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        torch.manual_seed(0)
        trainer._prepare_inputs([row for row in trainer.train_dataset.select(range(4)) for _ in range(4)])
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert MICRO_STEP in trainer._buffered_inputs[0]


@pytest.mark.parametrize("compact_updates", [None, False])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_resume_equals_never_stopping(tmp_path, compact_updates, loss_type):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 2}
    settings |= {"compact_updates": compact_updates, "loss_type": loss_type}
    runs = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        runs.append(make_trainer(make_args(tmp_path, **settings), even_digits, Recorder))
        runs[-1].train(resume_from_checkpoint=checkpoint)
    whole, resumed = runs
    assert torch.equal(whole.recorded[1], resumed.recorded[0])
    assert equal_weights(weights(whole), weights(resumed))


class Widths(TrainerCallback):
    """Tokens that the model reads, counted where it reads them."""

    def __init__(self, trainer):
        self.tokens = []
        trainer.model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, model, args, kwargs):
        if kwargs["input_ids"].size(1) > 1 and torch.is_grad_enabled():
            self.tokens.append(kwargs["input_ids"].numel())


def test_the_model_reads_what_is_logged(tmp_path):
    trainer = make_trainer(make_args(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=8))
    widths = Widths(trainer)
    trainer.train()
    assert len(widths.tokens) == 3 * 8
    logs = [log for log in trainer.state.log_history if "compact/padded_tokens" in log]
    assert sum(log["compact/padded_tokens"] for log in logs) == sum(widths.tokens)
    assert sum(log["compact/padded_tokens_saved"] for log in logs) > 0.3 * sum(widths.tokens)


def test_passes_without_a_gradient_are_trimmed_and_equal(tmp_path):
    trainer = make_compact_trainer(tmp_path)
    batch = make_batch(trainer, 1.0)
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    width, found, tokens = batch["completion_ids"].size(1), [], []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    for trainer._is_compact in (False, True):
        tokens.clear()
        with torch.no_grad():
            found.append(
                trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, mask, width, batch_size=4, compute_entropy=True
                )
            )
        assert len(tokens) == 6
        found[-1] += (sum(tokens),)
    for expected, ours in zip(found[0][:2], found[1][:2], strict=True):
        seen = batch["completion_mask"].bool()
        assert (ours - expected)[seen].abs().max() <= 2e-6
        assert not ours[~seen].any()
    assert found[1][-1] < 0.7 * found[0][-1]


def test_pad_to_multiple_of_is_honoured(tmp_path):
    trainer = make_compact_trainer(tmp_path, pad_to_multiple_of=4)
    batch = make_batch(trainer, 0.5)
    for side, pads in (("prompt", (3, 0)), ("completion", (0, 3))):
        for name in (f"{side}_ids", f"{side}_mask"):
            width = batch[name].size(1) // 4 * 4 + 4
            missing = width - batch[name].size(1)
            batch[name] = torch.nn.functional.pad(batch[name], (missing, 0) if pads[0] else (0, missing))
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        batch[name] = torch.nn.functional.pad(batch[name], (0, batch["completion_ids"].size(1) - batch[name].size(1)))
    found = assert_gradient_is_trls(trainer, batch, 2e-6)
    found += trainer._compact(split(batch | {"advantages": torch.zeros(24)}))
    widths = {part[name].size(1) for part in found for name in ("prompt_ids", "completion_ids")}
    assert all(width % 4 == 0 for width in widths)
    assert len(widths) > 2


# What the user sets


class OwnLoss(AdvantageGRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)


class OwnHook(AdvantageGRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


CASES = {
    "KL": ({"beta": 0.1}, AdvantageGRPOTrainer, "KL term"),
    "entropy bonus": ({"entropy_coef": 0.1}, AdvantageGRPOTrainer, "entropy bonus"),
    "quantile": ({"top_entropy_quantile": 0.5}, AdvantageGRPOTrainer, "top_entropy_quantile=0.5"),
    "own loss": ({}, OwnLoss, "`_compute_loss` of `OwnLoss`"),
    "own hook": ({}, OwnHook, "`compute_loss` of `OwnHook`"),
    "windows": ({"steps_per_generation": 2, "gradient_accumulation_steps": 3}, AdvantageGRPOTrainer, "3 steps"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_exact_is_said_in_one_line_or_refused(tmp_path, said, case):
    settings, trainer_class, reason = CASES[case]
    skip_unknown(settings)
    settings = {"per_device_train_batch_size": 8, **settings}
    make = partial(make_trainer, trainer_class=trainer_class)
    make(make_args(tmp_path, compact_updates=False, **settings))
    assert said == []
    make(make_args(tmp_path, **settings))
    (line,) = said
    assert reason in line
    with pytest.raises(ValueError, match=r"`compact_updates=True` should go with settings") as error:
        make(make_args(tmp_path, compact_updates=True, **settings))
    assert reason in str(error.value)


def test_noise_that_depends_on_the_width_keeps_the_padding(tmp_path, said):
    trainer = make_compact_trainer(tmp_path, neftune_noise_alpha=5.0)
    assert "keeps the padding everywhere" in said[0]
    batch = make_batch(trainer, 0.5)
    for name in ("prompt_ids", "completion_ids"):
        assert {part[name].size(1) for part in trainer._compact(split(batch))} == {batch[name].size(1)}


def test_nothing_is_said_where_all_is_exact(tmp_path, said):
    for setting in (None, True):
        make_trainer(make_args(tmp_path, compact_updates=setting, exchange_rows=True))
    assert said == []


def test_exchange_needs_rows_that_move(tmp_path):
    with pytest.raises(ValueError, match="`exchange_rows` should be False where `compact_updates=False`"):
        AdvantageGRPOConfig(str(tmp_path), exchange_rows=True, compact_updates=False)
    with pytest.raises(ValueError, match=r"`exchange_rows` should go with .*top_entropy_quantile=0.5"):
        make_trainer(make_args(tmp_path, exchange_rows=True, top_entropy_quantile=0.5))
    with pytest.raises(ValueError, match="log-probs may depend on padding"):
        make_compact_trainer(tmp_path, learned_positions(), exchange_rows=True)


def learned_positions():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 25}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1))


def test_learned_positions_keep_the_padding_left_of_prompts(tmp_path, said):
    trainer = make_compact_trainer(tmp_path, learned_positions())
    assert "keeps the padding left of prompts" in said[0]
    batch = make_batch(trainer, 0.5)
    trainer.model.eval()  # no dropout
    found = assert_gradient_is_trls(trainer, batch, 2e-6)
    needed = (batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1))[batch["advantages"] != 0].sum()
    assert trainer._metrics["train"]["compact/live_tokens"] == [needed]  # without that padding
    assert {part["prompt_ids"].size(1) for part in found} <= {batch["prompt_ids"].size(1), 1}
    assert count_padded(found) < 0.6 * count_padded(split(batch))


def test_unknown_tensors_leave_the_batch_as_it_is(tmp_path, said):
    trainer = make_compact_trainer(tmp_path)
    stock = split(make_batch(trainer, 0.5) | {"pixel_values": torch.ones(24, 3)})
    assert trainer._compact(stock) is stock
    assert said == ["`compact_updates` leaves a batch as it is: found `pixel_values`, which may not be one per row."]
    assert MICRO_STEP in trainer._compact(split(make_batch(trainer, 0.5)))[0]
    trainer._settings.compact_updates = True
    with pytest.raises(ValueError, match="found `pixel_values`"):
        trainer._compact(stock)


# MC-GRPO's promise


def test_the_pivot_costs_nothing(tmp_path):
    """G + 1 completions, the update of G: against plain GRPO on the kept rows, as many steps and no more tokens."""
    found = {}
    for estimator, extra in ((MCGRPO(), 1), (GRPO(), 0)):
        args = make_args(
            tmp_path,
            num_generations=8,
            num_extra_generations=extra,
            per_device_train_batch_size=8 + extra,
            gradient_accumulation_steps=4,
        )
        trainer = make_trainer(args, advantage_estimator=estimator)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 4
        found[type(estimator)] = trainer
    pivot, plain = found[MCGRPO], found[GRPO]
    stock = []
    pivot._compact = lambda batches: stock.extend(batches) or batches
    pivot._prepare_inputs([row for row in pivot.train_dataset.select(range(4)) for _ in range(9)])
    del pivot._compact
    rows = {name: torch.cat([batch[name] for batch in stock]) for name in stock[0] if stock[0][name].dim()}
    rows["advantages"] = torch.where(rows["tool_mask"].any(dim=1), torch.randn(36), torch.randn(36))
    is_kept = rows["tool_mask"].any(dim=1)
    assert is_kept.sum() == 32
    num_items = {"num_items_in_batch": rows["completion_mask"][is_kept].sum()}
    with_pivot = pivot._compact(split(rows | num_items, 4))
    without = plain._compact(split({name: value[is_kept] for name, value in rows.items()} | num_items, 4))
    assert len(with_pivot) == len(without) == 4
    assert count_padded(with_pivot) <= count_padded(without)
    assert distance(gradient(pivot, with_pivot), gradient(plain, without)) <= 1e-5
