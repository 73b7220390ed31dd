"""TRL's completion tables: groups where they can be recovered, and a plain word where they cannot."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from _training import make_args, make_trainer
from test_reward_log import last_or_none

from grpo_ext.advantages import GRPO
from grpo_ext.completions import is_completion_table, read_completions
from grpo_ext.replay import replay
from grpo_ext.reward_log import prompt_id, read_batches

LOGS = [{"step": 9, "reward": 0.5}]
"""Of a run that went further than the tables below, and did not evaluate."""


def write(path: Path, prompts: str, **columns: list) -> Path:
    """A table of one row per letter, each letter a prompt."""
    others = {"completion": ["x"] * len(prompts), "advantage": [0.0] * len(prompts)} | columns
    pd.DataFrame({"step": [3] * len(prompts), "prompt": list(prompts), **others}).to_parquet(path)
    return path


def test_a_table_of_trls_holds_what_the_log_holds(tmp_path):
    """Groups, rewards with unscorable rows, prompts and GRPO's advantages, for each step that was logged."""
    make_trainer(make_args(tmp_path, log_completions=True, log_rewards=True, temperature=3.0), last_or_none).train()
    paths = sorted((tmp_path / "completions").glob("*.parquet"))
    assert all(map(is_completion_table, paths))
    batches, remarks = read_completions(paths)
    logged = list(read_batches(tmp_path))
    assert len(batches) == len(logged) == 3
    for ours, theirs in zip(batches, logged, strict=True):
        assert torch.equal(ours.groups.rewards_PG.nan_to_num(nan=-9), theirs.groups.rewards_PG.nan_to_num(nan=-9))
        assert ours.groups.prompt_ids_P == theirs.groups.prompt_ids_P
        found_PG = GRPO(scale_rewards="group", multi_objective_aggregation="sum_then_normalize").estimate(ours.groups)
        assert torch.equal(ours.advantages_PG, found_PG.nan_to_num(nan=0.0))
    assert "(3 here): methods with a memory see gaps" in remarks[0]
    assert replay(batches, {"grpo": GRPO()}).outcomes[0].num_batches == 3


def test_group_sizes_come_from_the_prompts(tmp_path):
    """Certain where every prompt follows itself equally often; else the largest size that fits, with a remark."""
    path = write(tmp_path / "a.parquet", "aaabbb", right=[1.0, 0, 0, 1, 1, 1])
    batches, remarks = read_completions([path], logs=LOGS)
    assert batches[0].groups.rewards_PG.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batches[0].groups.prompt_ids_P == [prompt_id("a"), prompt_id("b")]
    assert len(remarks) == 1
    path = write(tmp_path / "b.parquet", "aaaabb", right=[1.0] * 6)
    batches, remarks = read_completions([path], logs=LOGS)
    assert batches[0].groups.rewards_PG.shape == (3, 2)
    assert "Groups of 2 completions were taken, the largest number that fits" in remarks[1]
    assert len(read_completions([path], num_generations=2, logs=LOGS)[1]) == 1


@pytest.mark.parametrize(("prompts", "size"), [("aabbb", None), ("abc", None), ("aaaabb", 4)])
def test_groups_that_cannot_be_recovered_are_one_sentence(tmp_path, prompts, size):
    path = write(tmp_path / "a.parquet", prompts, right=[1.0] * len(prompts))
    with pytest.raises(ValueError, match="the groups cannot be recovered, so log the run with `log_rewards=True`"):
        read_completions([path], size)


def test_several_rewards_are_added_with_the_weights_that_are_given(tmp_path):
    path = write(tmp_path / "a.parquet", "aa", right=[1.0, None], short=[2.0, 4.0], note=["x", "y"])
    batches, remarks = read_completions([path], logs=LOGS)
    assert batches[0].groups.rewards_PG.tolist() == [[3.0, 4.0]]
    assert "right, short were added with weight 1" in remarks[1]
    batches, remarks = read_completions([path], reward_weights=[1.0, 0.5], logs=LOGS)
    assert batches[0].groups.rewards_PG.tolist() == [[2.0, 2.0]]
    assert len(remarks) == 1
    with pytest.raises(ValueError, match="should give one number for each of"):
        read_completions([path], reward_weights=[1.0])
    with pytest.raises(ValueError, match="should hold a column of rewards"):
        read_completions([write(tmp_path / "b.parquet", "aa")])


def test_tables_of_steps_with_an_evaluation_are_left_out(tmp_path):
    """TRL mixes both kinds of rows in them."""
    paths = [write(tmp_path / "a.parquet", "aabb", right=[1.0, 0, 1, 1])]
    logs = [{"step": 3, "eval_reward": 0.5}, {"step": 9, "reward": 0.5}]
    with pytest.raises(ValueError, match="found 1 tables with one and no other: train with `log_rewards=True`"):
        read_completions(paths, logs=logs)
    for step, prompts, advantage in ((4, "aabb", 0.0), (5, "ccdd", 0.0), (6, "ccdd", 0.0), (7, "ccdd", 0.5)):
        path = write(tmp_path / f"{step}.parquet", prompts, right=[1.0, 0, 1, 1], advantage=[advantage] * 4)
        frame = pd.read_parquet(path)
        frame["step"] = step
        frame.to_parquet(path)
        paths.append(path)
    batches, remarks = read_completions(paths, logs=logs)
    assert [batch.step for batch in batches] == [5, 7]  # 4 still holds the rows of 3, and 6 those of 5
    assert "1 more were left out, because they repeat" in remarks[1]
    assert "2 more were left out, because TRL mixes" in remarks[2]
    assert any("no log says when it did" in remark for remark in read_completions(paths)[1])


def test_an_empty_table_is_passed_over(tmp_path):
    full = write(tmp_path / "a.parquet", "aabb", right=[1.0, 0, 1, 1])
    pd.read_parquet(full).iloc[:0].to_parquet(tmp_path / "b.parquet")
    assert len(read_completions([full, tmp_path / "b.parquet"])[0]) == 1
