"""What the trainer promises around the estimator."""

from dataclasses import dataclass, field

import pytest
import torch
from _training import DATA, Recorder, even_digits, make_args, make_trainer, short_or_none
from torch import Tensor
from trl import GRPOConfig

from grpo_ext import AdvantageGRPOConfig
from grpo_ext.advantages import AGRAE, AVSPO, GRPO, HADW, MCGRPO, METHODS, FixedAnchor
from grpo_ext.callbacks import AdvantageCallback, AdvantageCollapseCallback
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups


@dataclass
class Spy(AdvantageEstimator):
    """Counts its calls and gives each completion its place in the group."""

    num_updates: int = field(init=False, default=0)

    def estimate(self, groups: RewardGroups) -> Tensor:
        return groups.restrict(torch.arange(groups.rewards_PG.numel()).view_as(groups.rewards_PG).float())

    def update(self, groups: RewardGroups) -> None:
        self.num_updates += 1

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        return {"spy/num_updates": float(self.num_updates)}


def zero_one(completions, **kwargs):
    return [float(i % 2) for i in range(len(completions))]


def zero_two(completions, **kwargs):
    return [2.0 * (i % 2) for i in range(len(completions))]


def nothing(completions, **kwargs):
    return [None] * len(completions)


def infinite(completions, **kwargs):
    return [float("inf")] + [0.0] * (len(completions) - 1)


def test_estimators_advantages_reach_the_loss_and_the_log(tmp_path):
    trainer = make_trainer(make_args(tmp_path, max_steps=1), trainer_class=Recorder, advantage_estimator=Spy())
    trainer.train()
    assert trainer.recorded[0].tolist() == list(range(16))
    assert list(trainer._logs["advantages"]) == list(range(16))


@pytest.mark.parametrize(
    ("settings", "num_updates"),
    [
        ({}, 4),
        ({"num_iterations": 2}, 2),
        ({"steps_per_generation": 4}, 2),
        ({"steps_per_generation": 1, "per_device_train_batch_size": 16}, 8),
    ],
)
def test_state_moves_once_per_generation_batch(tmp_path, settings, num_updates):
    trainer = make_trainer(make_args(tmp_path, max_steps=4, **settings), advantage_estimator=Spy())
    trainer.train()
    assert trainer.advantage_estimator.num_updates == num_updates
    assert trainer.collapse_history.num_batches == num_updates


def test_metrics_are_read_before_update(tmp_path):
    trainer = make_trainer(make_args(tmp_path, max_steps=2), advantage_estimator=Spy())
    trainer.train()
    assert [log["spy/num_updates"] for log in trainer.state.log_history if "spy/num_updates" in log] == [0.0, 1.0]


@pytest.mark.parametrize(
    "estimator", [HADW(), AVSPO(), AGRAE(omega_ema=0.5), HADW(base=AVSPO()), MCGRPO()], ids=AdvantageEstimator.identity
)
def test_evaluation_writes_nothing(tmp_path, estimator):
    extra = estimator.num_extra_generations
    settings = {"per_device_eval_batch_size": 8, "num_extra_generations": extra}
    settings |= {"per_device_train_batch_size": 2 * (4 + extra)}
    args = make_args(tmp_path, max_steps=2, **settings)
    trainer = make_trainer(args, advantage_estimator=estimator, eval_dataset=DATA.select(range(8)))
    trainer.train()
    before = trainer.advantage_estimator.state_dict(), trainer.collapse_history.state_dict()
    first = trainer.evaluate()
    trainer.evaluate()
    assert (trainer.advantage_estimator.state_dict(), trainer.collapse_history.state_dict()) == before
    assert "eval_acr/rate" in first
    assert "eval_acr/cumulative" not in first


def test_evaluation_between_steps_leaves_the_state_where_training_alone_puts_it(tmp_path):
    """Evaluation moves the sampler's generator, so the reward is one of the row's place."""
    states = []
    for settings in ({}, {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}):
        args = make_args(tmp_path, max_steps=3, **settings)
        trainer = make_trainer(args, zero_one, advantage_estimator=HADW(), eval_dataset=DATA.select(range(8)))
        trainer.train()
        states.append((trainer.advantage_estimator.state_dict(), trainer.collapse_history.state_dict()))
    assert states[0] == states[1]
    assert len(states[0][0]["anchor"]["accuracies"]) == 3


def test_evaluation_puts_grpo_in_the_place_of_training_only_estimators(tmp_path):
    trainer = make_trainer(make_args(tmp_path), advantage_estimator=HADW(base=AVSPO(acr_threshold_init=0.9)))
    trainer.model.eval()
    assert trainer._active_estimator().identity() == "HADW(base=GRPO, anchor=MovingAverage)"
    assert trainer._active_estimator().anchor is trainer.advantage_estimator.anchor
    trainer.model.train()
    assert trainer._active_estimator() is trainer.advantage_estimator


def test_mc_grpo_samples_one_more_and_evaluates_with_the_users_number(tmp_path):
    args = make_args(tmp_path, num_extra_generations=1, per_device_train_batch_size=10, max_steps=1)
    assert args.num_generations == 4
    trainer = make_trainer(args, trainer_class=Recorder, advantage_estimator=MCGRPO())
    assert (trainer.num_generations, trainer.num_generations_eval, args.num_generations) == (5, 4, 4)
    trainer.train()
    assert len(trainer.recorded[0]) == 20
    assert trainer.state.log_history[0]["excluded/rows"] == 4


def test_the_error_says_which_sizes_divide(tmp_path):
    with pytest.raises(ValueError, match=r"groups of 9 .*found generation_batch_size=64: use 72 .* of 9\)"):
        make_args(
            tmp_path,
            num_generations=8,
            num_extra_generations=1,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=8,
        )


def test_a_size_the_error_names_works(tmp_path):
    args = make_args(
        tmp_path,
        num_generations=8,
        num_extra_generations=1,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=9,
    )
    assert args.generation_batch_size == 72


@pytest.mark.parametrize("estimator", [MCGRPO(), HADW(base=MCGRPO())], ids=AdvantageEstimator.identity)
def test_extra_generations_have_to_be_configured(tmp_path, estimator):
    with pytest.raises(ValueError, match=r"AdvantageGRPOConfig\(num_extra_generations=1\)"):
        make_trainer(make_args(tmp_path), advantage_estimator=estimator)
    with pytest.raises(ValueError, match="num_extra_generations"):
        make_trainer(make_args(tmp_path, num_extra_generations=4), advantage_estimator=GRPO())


def test_one_generation_is_no_group(tmp_path):
    with pytest.raises(ValueError, match="`num_generations` should be at least 2"):
        make_args(tmp_path, num_generations=1)


def test_a_plain_grpo_config_works(tmp_path):
    args = GRPOConfig(
        str(tmp_path), num_generations=4, max_steps=1, use_cpu=True, bf16=False, max_completion_length=8, report_to=[]
    )
    trainer = make_trainer(args, advantage_estimator="ha-dw")
    trainer.train()
    assert isinstance(trainer.advantage_estimator, HADW)


def test_an_instance_serves_two_trainers(tmp_path):
    estimator = HADW()
    first = make_trainer(make_args(tmp_path, scale_rewards="none"), advantage_estimator=estimator)
    second = make_trainer(make_args(tmp_path, scale_rewards="batch"), advantage_estimator=estimator)
    assert (estimator.base.scale_rewards, first.advantage_estimator.base.scale_rewards) == (None, "none")
    assert second.advantage_estimator.base.scale_rewards == "batch"


@pytest.mark.parametrize(
    ("estimator", "settings", "message"),
    [
        (GRPO(scale_rewards="group"), {"scale_rewards": "none"}, "set once"),
        (HADW(base=GRPO(scale_rewards="batch")), {"scale_rewards": "none"}, "set once"),
        (AVSPO(), {"scale_rewards": "batch"}, "scale_rewards"),
        (AVSPO(), {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        (MCGRPO(), {"scale_rewards": "none"}, "center_scale"),
        (MCGRPO(), {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        (Spy(), {"scale_rewards": "batch"}, "does not use it"),
    ],
    ids=lambda value: value.identity() if isinstance(value, AdvantageEstimator) else None,
)
def test_settings_of_trl_are_honoured_or_refused(tmp_path, estimator, settings, message):
    extra = {"num_extra_generations": 1, "per_device_train_batch_size": 10} if isinstance(estimator, MCGRPO) else {}
    with pytest.raises(ValueError, match=message):
        make_trainer(make_args(tmp_path, **settings, **extra), advantage_estimator=estimator)


def test_an_unknown_method_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=f"{', '.join(METHODS)}, found 'grop'"):
        make_trainer(make_args(tmp_path), advantage_estimator="grop")


def test_a_dotted_path_names_an_estimator(tmp_path):
    trainer = make_trainer(make_args(tmp_path), advantage_estimator="test_trainer:Spy")
    assert trainer.advantage_estimator.identity() == "Spy"
    with pytest.raises(ValueError, match="importable"):
        make_trainer(make_args(tmp_path), advantage_estimator="test_trainer:Nobody")
    with pytest.raises(ValueError, match="subclass"):
        make_trainer(make_args(tmp_path), advantage_estimator="builtins:dict")


def test_three_unscored_batches_are_an_error(tmp_path):
    trainer = make_trainer(make_args(tmp_path, max_steps=5), nothing, advantage_estimator=HADW())
    with pytest.raises(ValueError, match="first three generation batches"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.advantage_estimator.anchor.accuracies == []


def test_an_unscored_batch_teaches_nothing_and_is_no_error_later(tmp_path):
    calls = []

    def sometimes(completions, **kwargs):
        calls.append(1)
        return nothing(completions) if len(calls) > 1 else zero_one(completions)

    trainer = make_trainer(make_args(tmp_path, max_steps=5), sometimes, Recorder, advantage_estimator=HADW())
    trainer.train()
    assert len(trainer.advantage_estimator.anchor.accuracies) == 1
    assert all((advantages == 0).all() for advantages in trainer.recorded[1:])


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.0, 0.0]])
def test_an_infinite_reward_is_an_error(tmp_path, weights):
    with pytest.raises(ValueError, match="Rewards should be finite"):
        make_trainer(make_args(tmp_path, reward_weights=weights), [even_digits, infinite]).train()


def test_success_outside_its_bounds_is_an_error_for_methods_that_read_it(tmp_path):
    with pytest.raises(ValueError, match=r"found 2 .*success_reward.*reward_min.*reward_max"):
        make_trainer(make_args(tmp_path), zero_two, advantage_estimator=HADW()).train()
    make_trainer(make_args(tmp_path, max_steps=1), zero_two, advantage_estimator=GRPO()).train()


@pytest.mark.parametrize(
    "settings",
    [{"reward_max": 2.0}, {"success_reward": "zero_one"}, {"success_reward": "1"}, {"success_reward": 1}],
    ids=str,
)
def test_success_settings_fill_the_success_signal(tmp_path, settings):
    rewards = [zero_two] if "reward_max" in settings else [zero_two, zero_one]
    trainer = make_trainer(make_args(tmp_path, max_steps=1, **settings), rewards, advantage_estimator=HADW())
    trainer.train()
    assert trainer.advantage_estimator.anchor.accuracies == [0.5]


def test_an_unknown_success_reward_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"\['even_digits'\], found 'accuracy'"):
        make_trainer(make_args(tmp_path, success_reward="accuracy"))


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_logs_the_collapse_rate_and_its_own_numbers(tmp_path, method, recwarn):
    extra = METHODS[method].num_extra_generations
    settings = {"num_extra_generations": extra, "per_device_train_batch_size": 2 * (4 + extra), "max_steps": 2}
    trainer = make_trainer(make_args(tmp_path, **settings), advantage_estimator=method)
    trainer.train()
    logged = trainer.state.log_history[1]
    for name in ("rate", "all_correct", "all_incorrect", "other", "after", "cumulative", "first_100"):
        assert 0.0 <= logged[f"acr/{name}"] <= 1.0
    own = trainer.advantage_estimator.metrics(RewardGroups(torch.tensor([[1.0, 0.0, 1.0, 1.0]] * 4)))
    assert all(name in logged for name in own)


def test_without_a_success_signal_one_line_says_what_would_give_it(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("grpo_ext.watching.logger.warning_once", said.append)
    trainer = make_trainer(make_args(tmp_path, max_steps=1), lambda completions, **kwargs: [5.0] * len(completions))
    trainer.train()
    assert trainer.state.log_history[0]["acr/other"] == 1.0
    (line,) = said
    assert "`success_reward`, `reward_min` and `reward_max`" in line


def test_callbacks_are_told_and_the_last_line_says_what_taught_nothing(tmp_path, capsys):
    seen = []

    class Watch(AdvantageCallback):
        def on_advantages(self, args, state, control, *, groups, advantages_PG, history):
            seen.append((groups.rewards_PG.shape, advantages_PG.shape, history.num_batches))

    callbacks = [Watch(), AdvantageCollapseCallback()]
    trainer = make_trainer(make_args(tmp_path, max_steps=2), short_or_none, callbacks=callbacks)
    trainer.train()
    assert seen == [((4, 4), (4, 4), 1), ((4, 4), (4, 4), 2)]
    idle = sum(trainer.collapse_history.num_idle.values())
    assert f"{idle / 32:.1%} of 32 completions taught nothing" in capsys.readouterr().out
    assert trainer.collapse_history.num_idle["unscorable"] > 0


def test_running_figures_are_logged_as_they_stand(tmp_path):
    """Over four batches with rates 1, 0, 0, 0 the cumulative rate is 0.25, not the mean of 1, 1/2, 1/3 and 1/4."""
    calls = []

    def first_equal(completions, **kwargs):
        calls.append(1)
        return [0.0] * len(completions) if len(calls) == 1 else zero_one(completions)

    trainer = make_trainer(make_args(tmp_path, max_steps=4, logging_steps=4), first_equal)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["acr/cumulative"] == logged["acr/first_100"] == logged["acr/rate"] == 0.25


def test_the_users_number_of_generations_is_what_the_trainer_keeps(tmp_path):
    args = make_args(tmp_path, num_extra_generations=1, per_device_train_batch_size=10)
    trainer = make_trainer(args, advantage_estimator=MCGRPO())
    again = make_trainer(trainer.args, advantage_estimator=MCGRPO())
    assert (trainer.args.num_generations, trainer.num_generations, again.num_generations) == (4, 5, 5)


def test_a_class_instead_of_an_instance_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="with its parentheses"):
        make_trainer(make_args(tmp_path), advantage_estimator=GRPO)


def test_lengths_reach_the_estimator(tmp_path):
    seen = []

    class Lengths(Spy):
        def estimate(self, groups):
            seen.append((groups.lengths_PG, groups.progress))
            return super().estimate(groups)

    trainer = make_trainer(make_args(tmp_path, max_steps=2), advantage_estimator=Lengths())
    trainer.train()
    lengths_PG, progress = seen[1]
    assert lengths_PG.shape == (4, 4)
    assert 1 <= lengths_PG.min() <= lengths_PG.max() <= 10
    assert progress == 0.5


def test_a_fixed_anchor_trains(tmp_path):
    trainer = make_trainer(make_args(tmp_path, max_steps=1), advantage_estimator=HADW(anchor=FixedAnchor(0.4)))
    trainer.train()
    assert trainer.state.log_history[0]["ha_dw/anchor"] == 0.4


def test_without_an_accelerator_the_cpu_is_the_default(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    args = AdvantageGRPOConfig(str(tmp_path))
    assert (args.use_cpu, args.bf16) == (True, False)
    assert AdvantageGRPOConfig(str(tmp_path), use_cpu=True, bf16=True).bf16


@pytest.mark.parametrize(("name", "value"), [("num_extra_generations", -1), ("reward_min", 1.0)])
def test_our_settings_are_checked(tmp_path, name, value):
    with pytest.raises(ValueError, match=name):
        make_args(tmp_path, **{name: value})


def test_rewards_are_weighted_as_in_trl(tmp_path):
    args = make_args(tmp_path, max_steps=1, reward_weights=[2.0, 0.5])
    seen = []

    class Look(Spy):
        def estimate(self, groups):
            seen.append(groups)
            return super().estimate(groups)

    make_trainer(args, [zero_one, even_digits], advantage_estimator=Look()).train()
    groups = seen[0]
    expected = 2.0 * groups.rewards_PGF[..., 0] + 0.5 * groups.rewards_PGF[..., 1]
    assert torch.equal(groups.rewards_PG, expected)


def test_reward_weights_may_change_while_training(tmp_path):
    """As in TRL, which reads them at each batch."""
    seen = []

    class Shift(AdvantageCallback):
        def on_advantages(self, args, state, control, *, groups, **kwargs):
            seen.append((groups.rewards_PG, groups.rewards_PGF))
            trainer.reward_weights = torch.tensor([0.0, 1.0])

    functions = [even_digits, lambda completions, **kwargs: [0.25] * len(completions)]
    args = make_args(tmp_path, max_steps=2, reward_weights=[1.0, 0.0])
    trainer = make_trainer(args, functions, callbacks=[Shift()])
    trainer.train()
    assert torch.equal(seen[0][0], seen[0][1][..., 0])
    assert torch.equal(seen[1][0], seen[1][1][..., 1])
