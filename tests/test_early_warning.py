"""The early warning: for each rule a run where it speaks and a close one where it must not, and `grpo-ext diagnose`."""

import json
import random
import re
import subprocess
import sys
import types
from math import nan

import pytest
import torch
from _rewards import groups
from _training import even_digits, make_args, make_trainer

from grpo_ext.advantages import GRPO
from grpo_ext.callbacks import EarlyWarningCallback
from grpo_ext.cli import main as grpo_ext
from grpo_ext.cli.records import read_log_lines
from grpo_ext.diagnostics import batch_metrics
from grpo_ext.early_warning import RULES, EarlyWarning, Limits, check_rules, forecast
from grpo_ext.early_warning.evidence import Evidence
from grpo_ext.early_warning.tally import Batch, Tally, lower_bound, rise_z


def batch(rate=0.25, correct=0.125, incorrect=0.125, num=16, after=None, reward=0.5, **others):
    """Metrics of one batch; `others` are in place of what a healthy one has."""
    return {
        "acr/rate": rate,
        "acr/all_correct": correct,
        "acr/all_incorrect": incorrect,
        "acr/other": rate - correct - incorrect,
        "acr/after": rate if after is None else after,
        "acr/float_noise": 0.0,
        "groups/num": num,
        "groups/frac_unscorable": 0.0,
        "completions/frac_duplicates": 0.3,
        "groups/size": 8,
        "reward": reward,
        "advantage/abs_max": 2.5,
    } | {name.replace("__", "/"): value for name, value in others.items()}


def watch(*runs, limits=None, start=0):
    """What is said over runs of (number, metrics), by rule."""
    warning, texts = EarlyWarning(limits or Limits(), start), {}
    for number, metrics in runs:
        for _ in range(number):
            for finding in warning.observe(metrics):
                assert finding.name not in texts, "each rule speaks once"
                texts[finding.name] = finding.text
    return texts


def entropies(*values, name="entropy"):
    return [(1, {name: value}) for value in values]


# The numbers


def test_the_lower_bound_by_hand():
    """z = 4: 16 of 16 give 16/32; 8 of 16 give (1 - 4 sqrt(1/64 + 1/64)) / 2."""
    assert lower_bound(1.0, 16, 4) == pytest.approx(0.5)
    assert lower_bound(0.5, 16, 4) == pytest.approx((1 - 4 * (1 / 32) ** 0.5) / 2)
    assert lower_bound(0.0, 100, 4) == lower_bound(nan, 0, 4) == 0.0


def test_the_z_of_a_rise_by_hand():
    """A quarter and three quarters of a hundred: 0.5 / sqrt(0.25 (1/100 + 1/100)) = sqrt(50)."""
    assert rise_z(0.25, 100, 0.75, 100) == pytest.approx(50**0.5)
    assert rise_z(0.75, 100, 0.25, 100) == pytest.approx(-(50**0.5))
    assert rise_z(1.0, 10, 1.0, 10) == rise_z(nan, 0, 0.5, 10) == 0.0


def test_shares_are_pooled_as_counts():
    """One of one group and one of three: 2/4; of four groups one unscorable, and then of one all: 2/5."""
    tally = Tally([Batch({"acr/rate": 1.0, "groups/num": 1}, 0), Batch({"acr/rate": 1 / 3, "groups/num": 3}, 1)])
    assert (tally.mean("acr/rate"), tally.cases("acr/rate"), tally.span) == (0.5, 4, "batches 1 to 2")
    scored = Batch({"groups/frac_unscorable": 0.25, "groups/num": 3}, 0)
    unscored = Batch({"groups/frac_unscorable": 1.0, "groups/num": 0}, 1)
    assert Tally([scored, unscored]).mean("groups/frac_unscorable") == pytest.approx(2 / 5)


def test_memory_is_bounded_and_the_windows_do_not_overlap():
    evidence = Evidence(Limits(window=3, early_batches=4))
    for index in range(1, 30):
        evidence.add({"acr/rate": 0.0, "reward": float(index), "entropy": 1.0})
        assert len(evidence._last) <= 3
        assert evidence.has_last == (index >= 6)
    assert (evidence.first.mean("reward"), evidence.last.mean("reward")) == (2.0, 28.0)
    assert (evidence.first.span, evidence.last.span, evidence.early.span) == (
        *("batches 1 to 3", "batches 27 to 29", "batches 1 to 4"),
    )
    assert [len(evidence.first_entropies["entropy"]), len(evidence.last_entropies["entropy"])] == [5, 5]


@pytest.mark.parametrize("value", [0, -1, nan])
def test_a_limit_that_limits_nothing_is_refused(value):
    with pytest.raises(ValueError, match=r"`window` should be above 0, found .*: use 50"):
        Limits(window=value)


# Each rule: runs where it speaks, with words of its text, and close runs where it must not

HALF = batch(0.5, 0.25, 0.25)
ZERO = batch(1.0, 0.0, 1.0, num=4, reward=0.0)
EASY, HARD = batch(0.75, 0.7, 0.05, reward=0.8), batch(0.75, 0.05, 0.7, reward=0.2)
LOW, HIGH = entropies(*[1.0] * 5), entropies(*[0.1] * 5)
AVSPO = {"avspo__threshold": 0.5}
COPIES = {"completions__frac_duplicates": 0.85}

SPEAKS = {
    "constant_reward": [
        # Ten batches of four groups, twenty of one, a constant other than 0, and one that float32 does not hold.
        ([(10, ZERO)], "been 0 for every .* first 10 batches .40 groups.*call the reward function by hand"),
        ([(20, ZERO | {"groups/num": 1})], r"first 20 batches \(20 groups\)"),
        ([(10, batch(1.0, 1.0, 0.0, reward=1.0))], "been 1 for every .*does not look at the answer"),
        ([(5, batch(1.0, 0, 0, reward=10.1)), (5, batch(1.0, 0, 0, reward=10.1000004))], "been 10.1 for every"),
    ],
    "early_collapse": [
        # 120 of 160: (0.75 + 0.05 - 4 sqrt(0.1875 / 160 + 1 / 6400)) / 1.1 = 0.595
        ([(10, batch(0.75, 0.7, 0.05))], r"In 75% .* batches 1 to 10 \(160 groups\).*70% all correct, 5%.*too easy"),
        ([(10, batch(0.75, 0.05, 0.7))], "all incorrect.*--method avspo.*call the reward function"),
        ([(10, batch(0.75, 0.4, 0.35))], "both sides.*`num_generations` or `temperature`"),
        ([(10, batch(0.75, 0, 0))], "grades finer.*`success_reward`"),
        ([(10, batch(0.75, 0.05, 0.7, after=0.3))], "After the method 30% are without an advantage"),
        ([(10, {"acr/rate": 0.9375, "reward": 0.5}), (90, {"acr/rate": 0.9375})], "was not logged.*reward is 0.50"),
        ([(10, batch(0.75, 0.05, 0.7) | {"avspo/threshold": 0.9})], "equal rewards teach nothing"),
    ],
    "all_correct": [
        # 25 % and 70 % of 800
        ([(50, batch(0.35, 0.25, 0.1)), (50, EASY)], r"from 25% \(batches 1 to 50\) to 70% \(batches 51 to 100\)"),
    ],
    "all_incorrect": [
        ([(50, batch(0.35, 0.1, 0.25)), (50, HARD)], "to 70% .*fell from 0.50 to 0.20.*`learning_rate`"),
        ([(50, batch(0.35, 0.1, 0.25)), (50, HARD | {"reward": 0.6})], "to 70% .*too hard, or the reward"),
    ],
    "late_collapse": [
        ([(100, batch(0.25, 0.2, 0.05)), (50, batch(0.75, 0.4, 0.35))], "of batches .*both sides"),
    ],
    "one_group": [
        ([(10, batch(0.0, 0, 0, num=1, **AVSPO))], "holds one group.*threshold .*`gradient_accumulation_steps`"),
        # The threshold may come by the log line alone.
        ([(10, batch(0.0, 0, 0, num=1)), (1, {"avspo/threshold": 0.5})], "holds one group"),
    ],
    "float_noise": [
        ([(10, batch(acr__float_noise=0.25))], "25% of the groups .*rounding errors.*exact in float32"),
        ([(10, batch(1.0, 0, 0, acr__float_noise=1.0, advantage__abs_max=0.0094))], "up to 0.0094 in size"),
    ],
    "unscorable": [
        ([(10, batch(groups__frac_unscorable=0.5, num=8))], "50% of the groups .*return a number"),
        ([(40, batch(0, 0, 0, groups__frac_unscorable=1.0, num=0))], "100% of the groups"),
    ],
    "duplicates": [
        # 0.85 of the possible 0.875
        ([(50, batch(0.75, 0.4, 0.35, **COPIES))], "85% of the completions .*88% would be.*`temperature`"),
        # 0.74 of 0.75 with four completions
        ([(50, batch(1.0, 0.9, 0.1, completions__frac_duplicates=0.74, groups__size=4))], "74% of"),
    ],
    "entropy_collapse": [
        ([*LOW, *HIGH], "from 1 to 0.1 nats per token .`entropy`; medians of 5 log lines.*raise `temperature`"),
        (
            [*entropies(*[1.0] * 5, name="entropy_live"), *entropies(*[0.1] * 5, name="entropy_live")],
            "`entropy_live`, over the rows with an advantage alone",
        ),
    ],
    "entropy_explosion": [(entropies(*[0.4] * 5, *[2.0] * 5), "exploded from 0.4 to 2 nats.*lower `learning_rate`")],
}

SILENT = {
    "constant_reward": [
        [(9, ZERO)],  # too few batches
        [(19, ZERO | {"groups/num": 1})],  # too few groups
        [(3, ZERO), (1, ZERO | {"acr/rate": 0.75, "reward": 0.05}), (90, ZERO)],  # it could differ once
        [(5, ZERO), (50, batch(1.0, 1.0, 0.0, reward=1.0))],  # constant in each batch alone
        [(40, batch(0, 0, 0, num=0, reward=nan))],  # nothing was scored
    ],
    "early_collapse": [
        [(200, HALF)],
        [(9, batch(1.0, 0.5, 0.5))],  # too few batches
        [(13, batch(1.0, 1.0, 0.0, num=1)), (7, batch(0, 0, 0, num=1))],  # 13 of 20 single groups
        [(100, batch()), (300, batch(0.9, 0.5, 0.4))],  # not early
        [(100, ZERO)],  # said by constant_reward
        [(100, ZERO), (100, HARD)],
    ],
    "all_correct": [
        [(50, batch(0.35, 0.25, 0.1)), (200, batch(0.55, 0.44, 0.11))],  # 19 points
        [(50, batch(0.1, 0.05, 0.05)), (200, batch(0.45, 0.4, 0.05))],  # risen, but most still teach
        [(50, batch(0.35, 0.25, 0.1, num=1)), (50, batch(0.5, 0.5, 0.0, num=1))],  # 13 and 25 of 50
        [(200, batch(0.9, 0.8, 0.1))],  # high all along: early_collapse
        [(50, EASY), (50, batch())],  # falling
        [(90, batch()), (10, EASY)],  # not a window yet
    ],
    "all_incorrect": [
        [(50, batch(0.35, 0.1, 0.25)), (200, batch(0.55, 0.11, 0.44))],
        [(50, batch(0.35, 0.1, 0.25, num=1)), (50, batch(0.5, 0.0, 0.5, num=1))],
        [(300, ZERO)],
        [(50, HARD), (200, batch())],
    ],
    "late_collapse": [
        [(400, HALF)],
        [(60, batch()), (39, EASY)],  # not a window yet
        [(50, batch(0.75, 0.4, 0.35)), (100, batch(0.9, 0.5, 0.4))],  # said by early_collapse
        [(50, batch(0.35, 0.25, 0.1)), (200, EASY)],  # said by all_correct
    ],
    "one_group": [
        [(50, batch(num=2, **AVSPO))],
        [(50, batch(num=1))],  # not AVSPO
        [(49, batch(num=1, **AVSPO, groups__frac_unscorable=0.75))],  # four groups, three of them unscorable
        [(1, batch(num=4, **AVSPO)), (50, batch(num=1, **AVSPO))],
    ],
    "float_noise": [
        [(100, batch())],
        [(99, batch()), (1, batch(acr__float_noise=1.0)), (100, batch())],  # a single batch
        [(200, batch(acr__float_noise=0.05))],
    ],
    "unscorable": [
        [(200, batch(groups__frac_unscorable=0.2))],
        [(12, batch(groups__frac_unscorable=0.5, num=1))],  # 12 of 24: (0.5 + 1/3 - 0.70) / 1.67
        [(5, batch(groups__frac_unscorable=1.0, num=0)), (95, batch(num=1))],
    ],
    "duplicates": [
        [(200, batch(0.75, 0.4, 0.35, completions__frac_duplicates=0.7))],  # what short answers look like
        [(200, batch(0.5, 0.4, 0.1, **COPIES))],  # copies, but rewards that differ
        [(200, batch(1.0, 0.9, 0.1, **COPIES, groups__size=16))],  # 0.85 of 0.94
        [(200, {name: x for name, x in batch(1.0, 0.9, 0.1, **COPIES).items() if name != "groups/size"})],
    ],
    "entropy_collapse": [
        [*LOW, *entropies(0.1, 0.1, 0.1, 0.1, 0.3)],  # one line is above a fifth
        [*LOW, *entropies(*[0.1] * 4)],  # too few lines
        entropies(*[1.0] * 5, *[0.3] * 200),
        [*LOW, *entropies(*[0.1] * 5, name="entropy_live")],  # another quantity
    ],
    "entropy_explosion": [
        entropies(*[0.05] * 5, *[0.4] * 200),  # manifold, but low
        entropies(*[0.6] * 5, *[1.7] * 200),  # high, but not three times
        entropies(*[0.4] * 5, 2.0, 2.0, 2.0, 2.0, 1.1),
    ],
}


@pytest.mark.parametrize(("name", "runs", "words"), [(name, *case) for name, cases in SPEAKS.items() for case in cases])
def test_a_rule_speaks(name, runs, words):
    text = watch(*runs)[name]
    assert re.search(words, text), text
    assert text.endswith(".")
    assert "nan" not in text


@pytest.mark.parametrize(("name", "runs"), [(name, runs) for name, cases in SILENT.items() for runs in cases])
def test_a_rule_is_silent(name, runs):
    assert name not in watch(*runs)


def test_every_rule_is_tried_both_ways():
    assert SPEAKS.keys() == SILENT.keys() == RULES.keys()


def test_only_what_the_numbers_carry_is_advised():
    """No method where it repairs already, runs already, or would push what is right; no other rule beside a zero."""
    for metrics in (
        batch(0.75, 0.05, 0.7, after=0.3),
        batch(0.75, 0.05, 0.7, **AVSPO),
        batch(0.75, 0.7, 0.05),
    ):
        assert "--method" not in watch((10, metrics))["early_collapse"]
    assert watch((300, ZERO)).keys() == {"constant_reward"}
    assert watch((300, batch(1.0, 1.0, 0.0, reward=1.0))).keys() == {"constant_reward"}


def test_a_collapse_that_the_method_repairs_is_no_warning():
    """10 % of the groups are left without an advantage of 75 %; 30 % would be too many."""
    assert watch((10, batch(0.75, 0.05, 0.7, after=0.1))) == {}
    assert "early_collapse" in watch((10, batch(0.75, 0.05, 0.7, after=0.3)))


def test_without_the_reward_a_collapse_is_told_all_the_same():
    without = {name: value for name, value in batch(0.75, 0.05, 0.7).items() if name != "reward"}
    assert "early_collapse" in watch((10, without))


def test_a_single_name_is_a_rule():
    assert check_rules("late_collapse") == ("late_collapse",)


def test_a_missing_metric_silences_the_rules_that_need_it():
    warning = EarlyWarning()
    for _ in range(200):
        assert warning.observe({"acr/rate": 0.3, "loss": 0.1, "reward": None, "groups/num": nan}) == []
    silent = warning.silent()
    assert silent.keys() == RULES.keys() - {"early_collapse", "late_collapse"}
    assert silent["constant_reward"] == "no reward in the log"
    assert silent["entropy_collapse"] == "no entropy or entropy_live in the log"
    assert EarlyWarning().silent().keys() == RULES.keys()


def test_a_resumed_run_is_not_judged_by_a_beginning_that_was_not_seen():
    assert watch((300, ZERO), start=40).keys() == {"early_collapse"}
    assert watch((99, ZERO), start=100) == {}
    assert "batches 1001 to 1050" in watch((50, batch()), (50, EASY), start=1000)["all_correct"]


def test_false_alarms_are_rare():
    """A hundred runs of steady rates below the limits, with 1 to 16 groups a batch and noise in all that is logged."""
    alarms = 0
    for seed in range(100):
        draw = random.Random(seed)
        num, warning, found = (1, 2, 4, 16)[seed % 4], EarlyWarning(), []
        for step in range(150):
            counts = [draw.choices(("correct", "incorrect", "mixed"), (0.25, 0.2, 0.55))[0] for _ in range(num)]
            correct, incorrect = counts.count("correct") / num, counts.count("incorrect") / num
            metrics = batch(correct + incorrect, correct, incorrect, num=num, reward=draw.uniform(0.3, 0.7))
            metrics["acr/float_noise"] = float(draw.random() < 0.02) / num
            metrics["completions/frac_duplicates"] = draw.uniform(0.4, 0.875)
            found += warning.observe(metrics | ({"avspo/threshold": 0.5} if num > 1 else {}))
            found += warning.observe({"entropy": 0.5 * draw.uniform(0.5, 1.5)} if step % 5 == 0 else {})
        alarms += bool(found)
    assert alarms <= 5


# The forecast


def test_the_forecast_carries_its_scope():
    """51.4 - 29.6 / 2 = 36.6"""
    text = forecast(0.5)
    assert "36.6 % final accuracy" in text
    for scope in ("2605.21125", "245 runs", "0.5B to 14B", "MATH-500", "R2 0.617", "nothing about another setting"):
        assert scope in text
    with pytest.raises(ValueError, match=r"should lie in \[0, 1\], found 1.5"):
        forecast(1.5)


# The callback


def zero(completions, **kwargs):
    return [0.0] * len(completions)


QUICK = Limits(min_batches=2, constant_groups=8)


def train(folder, reward, callback, **settings):
    trainer = make_trainer(make_args(folder, max_steps=4, **settings), reward, callbacks=[callback])
    trainer.train(resume_from_checkpoint=settings.get("resume_from_checkpoint"))
    return trainer


def test_a_training_is_warned_once_and_stops_where_asked(tmp_path, capsys):
    """Two batches of four groups are told of in the second step; the checkpoint is the place to go on from."""
    callback = EarlyWarningCallback(QUICK, stop_on=("constant_reward",))
    trainer = train(tmp_path, zero, callback, save_strategy="steps", save_steps=100)
    written = capsys.readouterr().out
    assert trainer.state.global_step == 2
    assert written.count("Warning (constant_reward): The reward has been 0 for every") == 1
    assert "Training stops here, as `stop_on` asks for `constant_reward`." in written
    assert (tmp_path / "checkpoint-2").is_dir()
    trainer = train(tmp_path, zero, callback, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4  # the beginning was told of


def test_a_training_goes_on_where_nothing_or_nobody_asks(tmp_path, capsys):
    trainer = train(tmp_path, zero, EarlyWarningCallback(QUICK, stop_on=("all_correct",)))
    assert trainer.state.global_step == 4
    assert capsys.readouterr().out.count("Warning") == 1
    trainer = train(tmp_path, even_digits, EarlyWarningCallback(QUICK, stop_on=tuple(RULES)))
    assert trainer.state.global_step == 4
    assert "Warning" not in capsys.readouterr().out
    assert not list(tmp_path.glob("checkpoint-*"))


def test_entropy_comes_from_the_log_and_can_stop(tmp_path, capsys):
    """With limits that any falling or rising line passes; the second line is what stops."""
    limits = Limits(entropy_lines=1, entropy_fall=0.999, entropy_rise=0.999, entropy_high=1e-9)
    trainer = train(tmp_path, even_digits, EarlyWarningCallback(limits, ("entropy_collapse", "entropy_explosion")))
    lines = [line for line in trainer.state.log_history if "entropy_live" in line]
    first, second = [line["entropy_live"] for line in lines]
    assert trainer.state.global_step == lines[1]["step"] < 4
    name = "entropy_collapse" if second < first else "entropy_explosion"
    assert f"Warning ({name})" in capsys.readouterr().out


def test_the_forecast_is_written_once_where_it_is_asked_for(capsys):
    several = groups([[1, 1], [1, 0]])
    state, history = (
        types.SimpleNamespace(is_world_process_zero=True),
        types.SimpleNamespace(num_batches=0, num_earlier=0),
    )
    history.metrics = lambda: {"acr/first_100": 0.5}
    for asks in (False, True):
        callback = EarlyWarningCallback(forecast=asks)
        for num_batches in range(90, 110):
            history.num_batches = num_batches
            metrics = batch_metrics(several, GRPO().estimate(several))
            callback.on_batch_metrics(None, state, None, metrics=metrics, history=history)
        assert capsys.readouterr().out.count("36.6 % final accuracy") == asks


def test_a_rule_that_does_not_exist_is_one_sentence():
    with pytest.raises(ValueError, match="`stop_on` should name rules, found 'entropy': use one of constant_reward, "):
        EarlyWarningCallback(stop_on=["entropy"])


def test_the_metrics_of_a_batch_have_the_names_that_the_rules_need():
    several = groups([[10.1] * 7, [1, 0, 0, 0, 0, 0, 0]])
    metrics = batch_metrics(several, GRPO().estimate(several))
    assert metrics["acr/float_noise"] == 0.5
    assert metrics["reward"] == pytest.approx((70.7 + 1) / 14)
    assert {"acr/rate", "acr/after", "groups/num", "groups/frac_unscorable", "advantage/abs_max"} <= metrics.keys()


def test_the_rules_need_neither_torch_nor_transformers():
    code = "import sys, grpo_ext.early_warning; sys.exit(bool({'torch', 'transformers', 'trl'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command


@pytest.fixture(autouse=True)
def reward_log(monkeypatch):
    """A stand-in for the reward log, empty unless a test fills it."""
    log = types.SimpleNamespace(batches=[])
    monkeypatch.setattr("grpo_ext.cli.records.has_log", lambda run: bool(log.batches))
    monkeypatch.setattr("grpo_ext.cli.records.read_batches", lambda run: iter(log.batches))
    return log


def write_state(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"global_step": max(line["step"] for line in lines), "log_history": lines}
    (folder / "trainer_state.json").write_text(json.dumps(content))


def diagnose(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["grpo-ext", "diagnose", *map(str, arguments)])
    grpo_ext()
    return capsys.readouterr().out


def ours(*metrics, steps=10):
    return [values | {"step": steps * (index + 1), "loss": 0.0} for index, values in enumerate(metrics)]


def test_diagnose_a_run_of_ours(tmp_path, capsys, monkeypatch):
    """Ten lines of ten batches: 25 % all correct, then 70 %; the newest checkpoint went further than the folder."""
    healthy = batch(0.35, 0.25, 0.1, reward=0.4) | {"entropy_live": 0.5, "acr/first_100": 0.54}
    easy = EASY | {"entropy_live": 0.45, "acr/first_100": 0.54}
    evaluation = {"step": 100, "eval_reward": 0.9, "eval_acr/rate": 1.0}
    write_state(tmp_path, ours(*[healthy] * 5))
    write_state(tmp_path / "checkpoint-100", [*ours(*[healthy] * 5, *[easy] * 5), evaluation])
    before = sorted(tmp_path.rglob("*"))
    shown = diagnose(capsys, monkeypatch, tmp_path)
    assert "100 batches in 100 steps (trainer_state.json" in shown
    assert "mean reward 0.400 at first, 0.800 at last" in shown
    assert "equal rewards in 55% of the groups (48% all correct, 8% all incorrect, 0% other); 55% without" in shown
    assert "- The share of all-correct groups rose from 25% (batches 1 to 50) to 70% (batches 51 to 100)." in shown
    assert "Could not look at: one_group (no avspo/threshold in the log)." in shown
    assert "35.4 % final accuracy" in shown  # 51.4 - 29.6 * 0.54 = 35.416
    assert sorted(tmp_path.rglob("*")) == before
    assert diagnose(capsys, monkeypatch, tmp_path / "checkpoint-100") == shown


def test_diagnose_a_healthy_run(tmp_path, capsys, monkeypatch):
    write_state(tmp_path, ours(*[batch()] * 5))
    shown = diagnose(capsys, monkeypatch, tmp_path)
    assert "Nothing that could be looked at keeps this run from learning.\nLooked at: constant_reward, " in shown
    assert "all_correct (needs 100 batches, found 50)" in shown
    assert "entropy_collapse (no entropy or entropy_live in the log)" in shown
    assert "final accuracy" not in shown


def test_diagnose_a_run_of_stock_trl(tmp_path, capsys, monkeypatch):
    """Shares of sixteenths: with 16 groups a batch at least, 0.6875 of 30 batches is beyond the limit."""
    line = {"frac_reward_zero_std": 0.6875, "reward": 0.4, "entropy": 0.3}
    write_state(tmp_path, ours(*[line] * 30, steps=1))
    shown = diagnose(capsys, monkeypatch, tmp_path)
    assert "The rate is TRL's `frac_reward_zero_std`, which is wrong under" in shown
    assert "- In 69% of the groups of batches 1 to " in shown
    assert "was not logged (the mean reward is 0.40)" in shown
    assert "all_correct (no acr/all_correct in the log)" in shown
    assert "duplicates (no completions/frac_duplicates, groups/size in the log)" in shown


def test_the_groups_of_stock_trl_are_bounded_from_below():
    """0.4625 = 37/80 over five batches: 16 groups at least; a share of 1 says nothing."""
    shares = [1.0, 0.4625]
    lines = [{"step": 5 * (i + 1), "frac_reward_zero_std": share} for i, share in enumerate(shares)]
    records = read_log_lines({"log_history": lines})
    assert [(record.num_batches, record.metrics["groups/at_least"]) for record in records] == [(5, 16.0)] * 2


def test_diagnose_reads_the_reward_log_first(tmp_path, capsys, monkeypatch, reward_log):
    """Ten batches of two groups whose reward is 0; the log lines give entropy and threshold alone."""
    several = groups([[0.0, 0.0], [0.0, 0.0]])
    for step in range(10):
        logged = types.SimpleNamespace(batch=step, step=step, groups=several, advantages_PG=torch.zeros(2, 2))
        reward_log.batches.append(logged)
    lines = [batch() | {"avspo/threshold": 0.5, "entropy": value} for value in [1.0] * 5 + [0.1] * 5]
    write_state(tmp_path, ours(*lines, steps=1))
    shown = json.loads(diagnose(capsys, monkeypatch, tmp_path, "--json"))
    assert [finding["name"] for finding in shown["findings"]] == ["constant_reward", "entropy_collapse"]
    assert (shown["source"], shown["num_batches"], shown["figures"]["acr/rate"]) == ("reward log", 10, 1.0)
    assert shown["figures"]["reward_first"] == shown["figures"]["reward_last"] == 0.0
    assert shown["forecast"] is None
    assert "one_group" not in shown["silent"]


def test_diagnose_without_anything_to_read_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    write_state(tmp_path / "sft", [{"step": 1, "loss": 0.5}])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "trainer_state.json").write_text('{"log_history": [')
    for name, message in {
        "missing": "should be a folder, found none",
        "empty": "should hold a reward log, or a trainer_state.json with logged rewards .*found neither",
        "sft": "found neither: name the `output_dir` of a GRPO run",
        "torn": "should hold a reward log, or a trainer_state.json",
    }.items():
        with pytest.raises(SystemExit, match=f"error: .*{message}") as caught:
            diagnose(capsys, monkeypatch, tmp_path / name)
        assert "\n" not in str(caught.value)
