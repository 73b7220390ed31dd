"""Replay: the method that ran gives its advantages again, and others are counted as by hand."""

import json
import sys
from math import nan

import pytest
import torch
from _training import make_args, make_trainer
from test_reward_log import last_or_none

from grpo_ext.advantages import AGRAE, AVSPO, GRPO, HADW, MCGRPO, METHODS, UniformRewards
from grpo_ext.cli.replay import main
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.replay import Check, replay, replay_run
from grpo_ext.replay_picture import draw_replay
from grpo_ext.reward_log import LoggedBatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:AVSPO sees fewer than 4 groups"),
    pytest.mark.filterwarnings("ignore:MC-GRPO should see an odd number of completions"),
]

VARIANTS = [method() for method in METHODS.values()] + [
    AVSPO(acr_threshold_init=0.1, virtual_strategy=UniformRewards(seed=3)),
    HADW(base=AVSPO(acr_threshold_init=0.1)),
]


def logged(*batches: list[list[float]], **others: object) -> list[LoggedBatch]:
    """Batches of one attempt, without advantages of their own."""
    return [
        LoggedBatch(number, number, 1, RewardGroups(rewards_PG, **others), torch.zeros_like(rewards_PG), None)
        for number, rewards_PG in enumerate(map(torch.tensor, batches))
    ]


def train(folder, estimator: AdvantageEstimator, **settings: object) -> None:
    extra = estimator.num_extra_generations
    size = {"num_extra_generations": extra, "per_device_train_batch_size": 2 * (4 + extra)}
    args = make_args(folder, log_rewards=True, temperature=3.0, **size | settings)
    make_trainer(args, last_or_none, advantage_estimator=estimator).train()


@pytest.mark.parametrize("estimator", VARIANTS, ids=lambda estimator: estimator.identity())
def test_the_method_that_ran_gives_its_advantages_again(tmp_path, estimator):
    """Bit for bit, with unscorable rows, a memory that moves, and a resumed run."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, estimator, **settings)
    size = {"num_extra_generations": estimator.num_extra_generations, "temperature": 3.0, "max_steps": 4}
    size["per_device_train_batch_size"] = 2 * (4 + estimator.num_extra_generations)
    resumed = make_trainer(
        make_args(tmp_path, log_rewards=True, **size | settings), last_or_none, advantage_estimator=estimator
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    report = replay_run(tmp_path, {"grpo": GRPO()})
    assert (report.check.num_batches, report.check.num_equal, report.check.error) == (4, 4, None)
    assert "gives the logged advantages of 4 batches again, bit for bit" in report.check.describe()


def test_a_foreign_state_or_method_shows(tmp_path):
    """The check can fail: another argument, another state, an estimator that is gone."""
    train(tmp_path, HADW())
    path = tmp_path / "rewards" / "run.json"
    content = json.loads(path.read_text())
    entry = content["attempts"][0]

    def check(**changes: object) -> Check:
        path.write_text(json.dumps(content | {"attempts": [entry | changes]}))
        return replay_run(tmp_path, {}).check

    assert check().num_equal == 3
    assert (
        "does NOT give"
        in check(
            estimator={"class": "grpo_ext.advantages:AGRAE", "arguments": {}}, state=AGRAE().state_dict()
        ).describe()
    )
    gone = check(estimator={"class": "gone:Method", "arguments": {}})
    assert "could not be replayed. The estimator should be an importable" in gone.describe()


def test_a_batch_by_hand():
    """
    One group right in 1 of 4, one all wrong, one with a single scored row. GRPO: 1.5, -0.5 three times (times
    1 / (1 + 2e-4)); silent are the four wrong ones and the lone row.
    """
    batches = logged([[1.0, 0, 0, 0], [0.0] * 4, [1.0, nan, nan, nan]])
    (found,) = replay(batches, {"grpo": GRPO()}).outcomes
    assert (found.num_groups, found.num_collapsed, found.num_without_signal, found.num_rows) == (2, 1, 1, 9)
    shares = found.shares()
    assert shares["mass_pos"] == pytest.approx(0.5 / 3 * 3, rel=1e-3)
    assert shares["mass_neg"] == pytest.approx(-shares["mass_pos"], rel=1e-6)
    assert shares["frac_silent"] == pytest.approx(5 / 9)
    assert (shares["frac_opposite_sign"], shares["frac_woken"]) == (0.0, 0.0)


def test_avspo_wakes_what_grpo_leaves_silent():
    """Two of three groups collapse, above the threshold 0.5: their eight rows get a sign."""
    batches = logged([[1.0, 0, 0, 0], [0.0] * 4, [1.0] * 4])
    (found,) = replay(batches, {"avspo": AVSPO()}).outcomes
    assert (found.shares()["collapse_before"], found.shares()["collapse_after"]) == (pytest.approx(2 / 3), 0.0)
    assert (found.num_woken, found.num_silent, found.num_opposite) == (8, 0, 0)


class Contrary(AdvantageEstimator):
    """GRPO with the sign turned, and the first row left out."""

    def estimate(self, groups: RewardGroups) -> torch.Tensor:
        return -GRPO(scale_rewards="group", multi_objective_aggregation="sum_then_normalize").estimate(groups)

    def excluded(self, groups: RewardGroups) -> torch.Tensor:
        return torch.arange(groups.rewards_PG.shape[1]).expand_as(groups.rewards_PG) == 0


def test_opposite_signs_and_excluded_rows_are_counted():
    (found,) = replay(logged([[1.0, 0, 0, 0]]), {"contrary": Contrary()}).outcomes
    assert (found.num_opposite, found.num_silent) == (3, 1)


def test_memory_moves_along_the_log():
    """HA-DW's anchor at the second batch rests on the first."""
    first, second = [[1.0, 0, 0, 0]], [[1.0, 1, 0, 0]]
    both = replay(logged(first, second), {"ha_dw": HADW()}).outcomes[0]
    parts = [replay(logged(one), {"ha_dw": HADW()}).outcomes[0] for one in (first, second)]
    assert both.sum_pos != pytest.approx(parts[0].sum_pos + parts[1].sum_pos)


def test_groups_of_another_size():
    """A log of G + 1 gives GRPO its first G; MC-GRPO takes a log of G as G - 1 and the extra one."""
    batches = logged([[1.0, 0, 0, 0, 1.0]])
    attempts = [
        {
            "attempt": 1,
            "num_extra_generations": 1,
            "identity": "X",
            "device": "cpu",
            "state": {},
            "estimator": {"class": "x:y"},
        }
    ]
    grpo, mc_grpo = replay(batches, {"grpo": GRPO(), "mc_grpo": MCGRPO()}, attempts).outcomes
    assert (grpo.num_generations, grpo.num_rows, mc_grpo.num_generations, mc_grpo.num_rows) == (4, 4, 4, 5)
    grpo, mc_grpo = replay(batches, {"grpo": GRPO(), "mc_grpo": MCGRPO()}).outcomes
    assert (grpo.num_generations, mc_grpo.num_generations) == (5, 4)


def test_a_method_that_cannot_says_why_and_the_others_go_on():
    """Rewards up to 5 are no success signal, which HA-DW reads and GRPO does not."""
    ha_dw, grpo = replay(logged([[5.0, 0, 0, 0]]), {"ha_dw": HADW(), "grpo": GRPO()}).outcomes
    assert "`success_reward`" in ha_dw.error
    assert (grpo.error, grpo.num_batches) == (None, 1)


def test_the_check_tells_devices_apart():
    """Within 1e-6 is agreement where the device has changed, and none where it has not."""
    for device, word in (("cuda", "within 2e-07 (computed on cuda then, on cpu now)"), ("cpu", "does NOT give")):
        check = Check("GRPO", device)
        check.compare(torch.tensor([1.0 + 2e-7]), torch.tensor([1.0]))
        assert word in check.describe()
    check = Check("GRPO", "cuda")
    check.compare(torch.tensor([nan]), torch.tensor([1.0]))
    assert check.largest_difference == float("inf")


# The command


def test_from_a_run_folder_to_a_table_a_json_file_and_a_picture(tmp_path, capsys):
    train(tmp_path, HADW())
    main([str(tmp_path), "--method", "grpo", "ha_dw", "grpo_ext.advantages:MCGRPO", "avspo"])
    table = capsys.readouterr().out
    assert "HADW(base=GRPO, anchor=MovingAverage), which ran, gives the logged advantages of 3 batches again" in table
    content = json.loads((tmp_path / "replay.json").read_text())
    assert [row["method"] for row in content["methods"]] == ["grpo", "ha_dw", "grpo_ext.advantages:MCGRPO", "avspo"]
    assert content["check"]["num_equal"] == 3
    grpo = content["methods"][0]
    assert f"{grpo['collapse_before']:.1%}" in table
    assert grpo["frac_silent"] == grpo["num_silent"] / grpo["num_rows"]
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_shows_the_shares_of_each_method_that_could():
    """The lengths of the bars are the numbers of the report."""
    report = replay(logged([[5.0, 0, 0, 0], [0.0] * 4]), {"grpo": GRPO(), "ha_dw": HADW(), "mc_grpo": MCGRPO()})
    figure = draw_replay(report, "title")
    shares = [outcome.shares() for outcome in report.outcomes if outcome.method != "ha_dw"]
    bars = [[[bar.get_width() for bar in bars] for bars in axes.containers] for axes in figure.axes]
    expected = [("collapse_before", "collapse_after"), ("frac_silent", "frac_opposite_sign"), ("mass_pos", "mass_neg")]
    assert bars == [[[share[name] for share in shares] for name in names] for names in expected]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["grpo\nG = 4", "mc_grpo\nG = 3"]


def test_without_matplotlib_the_numbers_are_there_all_the_same(tmp_path, capsys, monkeypatch):
    make_trainer(make_args(tmp_path, log_rewards=True, max_steps=1), last_or_none).train()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    main([str(tmp_path), "--method", "grpo"])
    assert "for a picture `pip install 'grpo-ext[plot]'`" in capsys.readouterr().out
    assert (tmp_path / "replay.json").exists()


def test_a_part_of_a_log_stands_for_its_run(tmp_path, capsys):
    """With prompts and completions it looks like a table of TRL's."""
    args = make_args(tmp_path, log_rewards=True, log_reward_texts=True, temperature=3.0)
    make_trainer(args, last_or_none, advantage_estimator=HADW()).train()
    (part,) = (tmp_path / "rewards").glob("part-*")
    main([str(part), "--method", "grpo"])
    assert "gives the logged advantages of 3 batches again, bit for bit" in capsys.readouterr().out
    assert (tmp_path / "replay.json").exists()


def test_trls_tables_go_through_the_command_too(tmp_path, capsys):
    make_trainer(make_args(tmp_path, log_completions=True, temperature=3.0), last_or_none).train()
    main([str(tmp_path), "--method", "grpo", "--output", str(tmp_path / "there")])
    assert "methods with a memory see gaps" in capsys.readouterr().out
    assert (tmp_path / "there" / "replay.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "error: `nowhere` should be a run with a reward log, or hold TRL's completion tables"),
        (["nowhere", "--method", "gpro"], "error: The method should be one of"),
        ([".", "."], "error: RUN should be one folder, found 2: replay them one by one"),
        (["nowhere", "--num_generations", "0"], "invalid positive value: '0'"),
        (
            ["nowhere", "--method", "grpo_ext.estimator:AdvantageEstimator"],
            "should name classes that need no arguments",
        ),
        (["nowhere", "--metod", "grpo"], "error: The command line should be valid, found unrecognized"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(words)


def test_grpo_wakes_nothing_of_its_own():
    """Its advantages of seven rewards of 0.1 are float noise, on both sides of the comparison."""
    batches = logged([[0.1] * 7, [10.1] * 7, [1.0] * 6 + [0.0]])
    (found,) = replay(batches, {"grpo": GRPO()}).outcomes
    assert GRPO().estimate(batches[0].groups).abs().max() > 1e-5
    assert (found.num_woken, found.num_silent) == (0, 14)
