"""The embedded default: what the task asks, what the policy can do before training, and that it learns."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ext.cli.train import main
from grpo_ext.diagnostics import collapse_causes
from grpo_ext.groups import RewardGroups
from grpo_ext.rewards import boxed_accuracy, last_boxed
from grpo_ext.testbed import POLICY_PATH
from grpo_ext.testbed.arithmetic import SLIP_RATES, demonstrate, make_problems


def test_answers_are_right():
    for row in make_problems(500, seed=1):
        expression = str(row["problem"]).removeprefix("What is ").removesuffix("?")
        assert str(eval(expression)) == row["answer"]  # digits and signs only, from make_problems


def test_problems_repeat_with_the_seed_and_splits_share_none():
    assert make_problems(50, seed=3) == make_problems(50, seed=3)
    assert make_problems(50, seed=3) != make_problems(50, seed=4)
    train = {row["problem"] for row in make_problems(3000, "train")}
    test = {row["problem"] for row in make_problems(500, "test")}
    assert not train & test


def test_levels_follow_the_mix():
    assert [row["level"] for row in make_problems(5, levels=(5, 5, 1))] == [5, 5, 1, 5, 5]


@pytest.mark.parametrize("level", list(SLIP_RATES))
def test_demonstrations_slip_more_on_higher_levels(level):
    rng = random.Random(0)
    shown = [demonstrate(level, rng) for _ in range(400)]
    right = 0
    for problem, solution in shown:
        answer = str(eval(problem.removeprefix("What is ").removesuffix("?")))
        right += last_boxed(solution) == answer
    low, high = {1: (1, 1), 2: (0.7, 0.9), 3: (0.35, 0.65), 4: (0.15, 0.4), 5: (1, 1)}[level]
    assert low <= right / 400 <= high


def test_the_policy_is_small():
    assert (POLICY_PATH / "model.safetensors").stat().st_size <= 4e6


def test_at_the_start_groups_collapse_on_both_sides():
    """25-60 % of the groups of eight, some of them all correct and some all incorrect; the rest has room to learn."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(POLICY_PATH)
    model = AutoModelForCausalLM.from_pretrained(POLICY_PATH)
    rows = make_problems(100, "test")
    from grpo_ext.data import PROMPT_TEMPLATE

    prompts = [PROMPT_TEMPLATE.replace("{problem}", str(row["problem"])) + "\n" for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    sampled = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=32, num_return_sequences=8)
    texts = tokenizer.batch_decode(sampled[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = boxed_accuracy(texts, answer=[str(row["answer"]) for row in rows for _ in range(8)])
    groups = RewardGroups(torch.tensor(rewards).view(100, 8))
    causes = {cause: is_cause_P1.double().mean().item() for cause, is_cause_P1 in collapse_causes(groups).items()}
    assert 0.25 <= causes["all_correct"] + causes["all_incorrect"] <= 0.60
    assert min(causes["all_correct"], causes["all_incorrect"]) >= 0.05
    assert 0.2 <= groups.rewards_PG.mean() <= 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_plain_grpo_learns(tmp_path, seed):
    """The mean reward on problems never trained on rises by at least 0.10."""
    import json

    arguments = ["--method", "grpo", "--seed", str(seed), "--output_dir", str(tmp_path), "--save_strategy", "no"]
    torch.set_num_threads(2)
    main([*arguments, "--eval_strategy", "steps", "--eval_on_start", "true", "--eval_steps", "100"])
    torch.set_num_threads(1)
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    rewards = [entry["eval_reward"] for entry in history if "eval_reward" in entry]
    assert rewards[-1] - rewards[0] >= 0.10
