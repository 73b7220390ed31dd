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
    batches, remarks = read_completions([path])
    assert batches[0].groups.rewards_PG.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batches[0].groups.prompt_ids_P == [prompt_id("a"), prompt_id("b")]
    assert len(remarks) == 1
    path = write(tmp_path / "b.parquet", "aaaabb", right=[1.0] * 6)
    batches, remarks = read_completions([path])
    assert batches[0].groups.rewards_PG.shape == (3, 2)
    assert "Groups of 2 completions were taken, the largest number that fits" in remarks[1]
    assert len(read_completions([path], num_generations=2)[1]) == 1


@pytest.mark.parametrize(("prompts", "size"), [("aabbb", None), ("abc", None), ("aaaabb", 4)])
def test_groups_that_cannot_be_recovered_are_one_sentence(tmp_path, prompts, size):
    path = write(tmp_path / "a.parquet", prompts, right=[1.0] * len(prompts))
    with pytest.raises(ValueError, match="the groups cannot be recovered, so log the run with `log_rewards=True`"):
        read_completions([path], size)


def test_several_rewards_are_added_with_the_weights_that_are_given(tmp_path):
    path = write(tmp_path / "a.parquet", "aa", right=[1.0, None], short=[2.0, 4.0], note=["x", "y"])
    batches, remarks = read_completions([path])
    assert batches[0].groups.rewards_PG.tolist() == [[3.0, 4.0]]
    assert "right, short were added with weight 1" in remarks[1]
    batches, remarks = read_completions([path], reward_weights=[1.0, 0.5])
    assert batches[0].groups.rewards_PG.tolist() == [[2.0, 2.0]]
    assert len(remarks) == 1
    with pytest.raises(ValueError, match="should give one number for each of"):
        read_completions([path], reward_weights=[1.0])
    with pytest.raises(ValueError, match="should hold a column of rewards"):
        read_completions([write(tmp_path / "b.parquet", "aa")])


def test_tables_of_steps_with_an_evaluation_are_left_out(tmp_path):
    """TRL mixes both kinds of rows in them."""
    paths = [write(tmp_path / "a.parquet", "aabb", right=[1.0, 0, 1, 1])]
    with pytest.raises(ValueError, match="found 1 with one: train with `log_rewards=True`"):
        read_completions(paths, evaluated_steps={3})
    frame = pd.read_parquet(paths[0])
    frame["step"] = 4
    frame.to_parquet(tmp_path / "b.parquet")
    batches, remarks = read_completions([*paths, tmp_path / "b.parquet"], evaluated_steps={3})
    assert [batch.step for batch in batches] == [4]
    assert "1 more were left out, because TRL mixes" in remarks[1]
