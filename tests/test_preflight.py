"""Pre-flight: closed forms by enumeration, intervals and levels in simulation, and the command from counts to data."""

import doctest
import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset

from grpo_ext import difficulty, population, progress
from grpo_ext import preflight as forecasts
from grpo_ext.cli import main as grpo_ext_command
from grpo_ext.cli import train
from grpo_ext.cli.preflight import main, make_parser
from grpo_ext.data import load_split, to_prompts
from grpo_ext.difficulty import difficulty_levels, level_of
from grpo_ext.groups import RewardSettings
from grpo_ext.population import estimate_mean, fit_population, likelihood, make_grid
from grpo_ext.preflight import (
    CollapseForecast,
    Estimate,
    collapse_probability,
    forecast_collapse,
    informative_range,
    preferred_num_generations,
)
from grpo_ext.reward_log import RewardLog, prompt_id
from grpo_ext.testbed import POLICY_PATH

POPULATIONS = {
    "uniform": lambda rng, size: rng.random(size),
    "u_shaped": lambda rng, size: rng.beta(0.3, 0.3, size),
    "mostly_hard": lambda rng, size: rng.beta(0.2, 2, size),
    "bimodal": lambda rng, size: rng.choice([0.0, 1.0, np.nan], size, p=[0.3, 0.3, 0.4]),
    "extreme": lambda rng, size: rng.beta(0.02, 0.02, size),
}
SIZES = (2, 4, 8, 16, 32)


def simulate(name, num_problems, num_samples, seed):
    """Success probabilities, and counts drawn from them; the middle part of `bimodal` is uniform."""
    rng = np.random.default_rng(seed)
    success_rate_P = POPULATIONS[name](rng, num_problems)
    success_rate_P = np.where(np.isnan(success_rate_P), rng.random(num_problems), success_rate_P)
    return success_rate_P, rng.binomial(num_samples, success_rate_P), np.full(num_problems, num_samples)


def num_covered(name, num_problems, num_samples, num_generations):
    """In how many of 100 simulations the interval holds the expected rate; and the plug-in's interval."""
    ours = plug_in = 0
    for seed in range(100):
        success_rate_P, correct_P, samples_P = simulate(name, num_problems, num_samples, seed)
        truth = collapse_probability(success_rate_P, num_generations).mean()
        fitted = fit_population(correct_P, samples_P)
        found = estimate_mean(fitted, collapse_probability(fitted.grid_J, num_generations))
        ours += found.low <= truth <= found.high
        naive_P = collapse_probability(correct_P / samples_P, num_generations)
        plug_in += abs(naive_P.mean() - truth) <= 1.96 * naive_P.std() / math.sqrt(num_problems)
    return ours, plug_in


@pytest.mark.parametrize("module", [population, forecasts, difficulty])
def test_the_examples_of_the_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0


@pytest.mark.parametrize("num_generations", [2, 3, 5])
def test_the_closed_form_is_the_sum_over_all_groups(num_generations):
    p = 0.3
    groups = itertools.product([0, 1], repeat=num_generations)
    expected = sum(math.prod(p if r else 1 - p for r in group) for group in groups if len(set(group)) == 1)
    assert collapse_probability(np.array([p]), num_generations)[0] == pytest.approx(expected)


def unbiased_collapse_rate(num_correct: list[int], num_samples: list[int], num_generations: int) -> float:
    """The slow reference: the share of all subsets of G of a problem's samples that agree, the mean over problems."""
    shares = [
        (math.comb(k, num_generations) + math.comb(n - k, num_generations)) / math.comb(n, num_generations)
        for k, n in zip(num_correct, num_samples, strict=True)
    ]
    return sum(shares) / len(shares)


def test_the_unbiased_rate_is_the_share_of_subsets_that_agree():
    """Of the 35 triples of 4 successes and 3 failures, 4 + 1 agree."""
    outcomes = [1, 1, 1, 1, 0, 0, 0]
    triples = list(itertools.combinations(outcomes, 3))
    expected = sum(len(set(triple)) == 1 for triple in triples) / len(triples)
    assert unbiased_collapse_rate([4], [7], 3) == pytest.approx(expected) == pytest.approx(5 / 35)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_unbiased_rate_is_unbiased(p):
    chances = [math.comb(6, k) * p**k * (1 - p) ** (6 - k) for k in range(7)]
    expected = sum(chance * unbiased_collapse_rate([k], [6], 4) for k, chance in enumerate(chances))
    assert expected == pytest.approx(p**4 + (1 - p) ** 4)


def test_the_estimate_is_near_the_unbiased_one():
    """Both estimate the same quantity, where the samples fix it."""
    _, correct_P, samples_P = simulate("u_shaped", 500, 64, seed=3)
    fitted = fit_population(correct_P, samples_P)
    for num_generations in SIZES:
        found = estimate_mean(fitted, collapse_probability(fitted.grid_J, num_generations))
        assert found.value == pytest.approx(
            unbiased_collapse_rate(list(map(int, correct_P)), list(map(int, samples_P)), num_generations), abs=0.005
        )


def test_likelihoods_are_binomial():
    grid_J = make_grid(9)
    correct_U, samples_U = np.array([0, 2, 5]), np.array([4, 5, 5])
    for row, k, n in zip(likelihood(correct_U, samples_U, grid_J), correct_U, samples_U, strict=True):
        expected_J = np.array([p**k * (1 - p) ** (n - k) for p in grid_J.tolist()])
        np.testing.assert_allclose(row, expected_J / expected_J.max(), atol=1e-12)


def test_the_fit_is_the_maximum():
    """At the maximum no point of the grid has a directional derivative above 0 (Lindsay 1983)."""
    _, correct_P, samples_P = simulate("u_shaped", 300, 8, seed=0)
    fitted = fit_population(correct_P, samples_P)
    gradient_J = fitted.shares_U / (fitted.likelihood_UJ @ fitted.weights_J) @ fitted.likelihood_UJ - 1
    assert fitted.weights_J.sum() == pytest.approx(1)
    assert gradient_J.max() < 0.002


@pytest.mark.parametrize(
    ("name", "num_problems", "num_samples", "num_generations"),
    [("u_shaped", 100, 8, 8), ("mostly_hard", 100, 4, 16), ("bimodal", 500, 16, 4), ("uniform", 500, 64, 8)],
)
def test_the_interval_covers_the_expected_rate(name, num_problems, num_samples, num_generations):
    assert num_covered(name, num_problems, num_samples, num_generations)[0] >= 90


def test_the_plug_in_does_not():
    """The negative control: E[(k/n)^G] is larger than p^G."""
    ours, plug_in = num_covered("u_shaped", 100, 8, 16)
    assert plug_in < 50 <= 90 <= ours


@pytest.mark.slow
@pytest.mark.parametrize("num_generations", SIZES)
@pytest.mark.parametrize("num_samples", [4, 8, 16, 64])
@pytest.mark.parametrize("num_problems", [100, 500])
@pytest.mark.parametrize("name", ["uniform", "u_shaped", "mostly_hard", "bimodal"])
def test_the_interval_covers_everywhere(name, num_problems, num_samples, num_generations):
    assert num_covered(name, num_problems, num_samples, num_generations)[0] >= 90


def test_what_the_samples_do_not_fix_has_a_wide_interval():
    """More problems make it narrow where G <= n, and hardly where G is far above n."""
    widths = {}
    for num_problems in (100, 5000):
        _, correct_P, samples_P = simulate("u_shaped", num_problems, 4, seed=0)
        fitted = fit_population(correct_P, samples_P)
        for num_generations in (2, 32):
            found = forecast_collapse(fitted, num_generations).rate
            widths[num_generations, num_problems] = found.high - found.low
    assert widths[2, 5000] < 0.25 * widths[2, 100]
    assert widths[32, 5000] > 0.5 * widths[32, 100]


def test_the_split_adds_up_and_the_cost_is_what_is_sampled():
    fitted = fit_population([64] * 50 + [32] * 50, [64] * 100)
    found = forecast_collapse(fitted, 4)
    assert found.all_correct.value + found.all_incorrect.value == pytest.approx(found.rate.value)
    assert found.all_correct.value > 0.45 > 0.1 > found.all_incorrect.value
    assert found.cost.value == pytest.approx(4 / (1 - found.rate.value))
    assert found.cost.low < found.cost.value < found.cost.high


@pytest.mark.parametrize("num_generations", [3, 4, 8, 32])
def test_the_range_ends_where_every_second_group_collapses(num_generations):
    low, high = informative_range(num_generations)
    ends = collapse_probability(np.array([low, high]), num_generations)
    np.testing.assert_allclose(ends, 0.5, atol=1e-9)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        # Informative shares of 2, 4, 8, 16, 32 completions: 0.5, 0.875, 0.992: 4 to 8 gains 13 %.
        (0.5, 4),
        # 0.18, 0.344, 0.570, 0.815, 0.966: 8 to 16 gains 43 %, 16 to 32 gains 19 %.
        (0.1, 16),
        # 0.02, 0.04, 0.08, 0.15, 0.28: every doubling gains more than 80 %, so none of these is enough.
        (0.01, None),
        (0.0, None),
    ],
)
def test_harder_problems_prefer_larger_groups(p, expected):
    nothing = Estimate(0, 0, 0)
    rates = [float(collapse_probability(np.array([p]), size)[0]) for size in SIZES]
    found = [
        CollapseForecast(size, Estimate(rate, 0, 1), nothing, nothing, nothing)
        for size, rate in zip(SIZES, rates, strict=True)
    ]
    assert preferred_num_generations(found) == expected


@pytest.mark.parametrize("num_samples", [4, 16, 64])
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_range_of_levels_holds_the_true_one(name, num_samples):
    success_rate_P, correct_P, samples_P = simulate(name, 2000, num_samples, seed=0)
    found, truth_P = difficulty_levels(correct_P, samples_P), level_of(success_rate_P)
    assert ((found.level_low_P <= truth_P) & (truth_P <= found.level_high_P)).mean() >= 0.95
    is_certain_P = found.level_low_P == found.level_high_P
    if num_samples == 64:
        assert (found.level_P == truth_P)[is_certain_P].mean() >= 0.95
        assert np.abs(found.level_P - truth_P).max() <= 2


def test_labels_are_right_where_few_problems_lie_near_a_bound():
    """No label can be right for 95 % of a population that is dense at the bounds."""
    success_rate_P, correct_P, samples_P = simulate("extreme", 2000, 64, seed=0)
    assert (difficulty_levels(correct_P, samples_P).level_P == level_of(success_rate_P)).mean() >= 0.95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([3], [2]), "found 3 of 2 at problem 0"),
        (([1, 0], [2, 0]), "found 0 of 0 at problem 1"),
        (([None], [2]), "found nan of 2"),
        (([], []), "found the shapes"),
        (([1], [2], [0.5, 0.1]), "should be 6 falling numbers"),
        (([1], [2], [0.95, 0.75, 0.5, 0.5, 0.05, 0.01]), "should be 6 falling numbers"),
    ],
)
def test_what_are_no_counts_or_bounds(arguments, message):
    with pytest.raises(ValueError, match=message):
        difficulty_levels(*arguments)


def test_a_group_of_one_cannot_collapse():
    with pytest.raises(ValueError, match="should be at least 2, found 1"):
        forecast_collapse(fit_population([1], [2]), 1)


ROWS = [
    {"problem": f"What is {n}+{n}?", "answer": str(2 * n), "level": "Level 1", "num_correct": k, "num_samples": 16}
    for n, k in enumerate([0, 6, 16, 6, 0, 16, 5, 7] * 4)
]


def write_rows(folder, suffix="parquet", rows=ROWS):
    path = folder / f"counts.{suffix}"
    data = Dataset.from_list(rows)
    {"parquet": data.to_parquet, "jsonl": data.to_json, "csv": data.to_csv}[suffix](str(path))
    return str(path)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_from_a_file_to_a_table_and_data(tmp_path, capsys, suffix):
    folder = tmp_path / "out"
    main(["--counts", write_rows(tmp_path, suffix), "--output_dir", str(folder), "--num_generations", "8", "2"])
    shown = capsys.readouterr().out
    assert "32 problems, 512 samples" in shown
    assert "None of these --num_generations is large enough: each doubling makes at least 25 %" in shown
    result = json.loads((folder / "preflight.json").read_text())
    assert [entry["num_generations"] for entry in result["collapse"]] == [2, 8]
    assert result["problems_by_level"] == [8, 0, 0, 16, 0, 0, 8]
    levels = load_split(str(folder / "levels.parquet"), "train")
    assert levels["original_level"][0] == "Level 1"
    assert [levels["level"][row] for row in (0, 1, 2)] == [6, 3, 0]
    assert list(levels["num_correct"]) == [row["num_correct"] for row in ROWS]


def test_help_names_every_flag(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-ext", "preflight", "--help"])
    with pytest.raises(SystemExit, match="0"):
        grpo_ext_command()
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in vars(make_parser().parse_args([])))


def test_a_list_of_outcomes_is_counted(tmp_path):
    rows = [{"success": [1.0, 0.0, None, 0.5]}, {"success": [1.0, 1.0, 1.0, 1.0]}] * 4
    main(["--counts", write_rows(tmp_path, rows=rows), "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "preflight.json").read_text())["num_samples"] == 4 * (3 + 4)
    assert not (tmp_path / "levels.parquet").exists()


def test_the_subset_trains(tmp_path):
    """Level 3 has 16 problems, of which 8 are drawn; the run takes the file as it is."""
    counts = write_rows(tmp_path)
    main(["--counts", counts, "--output_dir", str(tmp_path), "--subset", "3", "--subset_size", "8"])
    first = load_split(str(tmp_path / "level3-8.parquet"), "train")
    assert set(first["level"]) == {3}
    main(["--counts", counts, "--output_dir", str(tmp_path), "--subset", "3", "--subset_size", "8"])
    assert load_split(str(tmp_path / "level3-8.parquet"), "train")[:] == first[:]
    train.main(
        [
            *["--dataset_name", str(tmp_path / "level3-8.parquet"), "--model_name_or_path", str(POLICY_PATH)],
            *["--max_steps", "1", "--num_generations", "2", "--per_device_train_batch_size", "4"],
            *["--max_completion_length", "4", "--save_strategy", "no", "--output_dir", str(tmp_path / "run")],
            *["--gradient_accumulation_steps", "1", "--report_to", "none", "--gradient_checkpointing", "false"],
        ]
    )
    assert (tmp_path / "run" / "model.safetensors").exists()


SAMPLE = ["--num_samples", "4", "--limit", "6", "--max_completion_length", "24", "--batch_size", "2"]


def test_from_the_embedded_policy_and_on_after_a_stop(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.0)
    folder = tmp_path / "out"
    main([*SAMPLE, "--output_dir", str(folder)])
    assert "sampled problems: 4 of 6, " in capsys.readouterr().err
    samples = folder / "samples.jsonl"
    complete = samples.read_text()
    levels = load_split(str(folder / "levels.parquet"), "train")
    assert {"problem", "answer", "original_level", "level", "success_rate"} <= set(levels.column_names)
    assert "prompt" not in levels.column_names
    # What a kill within the second batch leaves: one batch, a line of the next, and half of another.
    samples.write_text("\n".join(complete.split("\n")[:4]) + '\n{"num_cor')
    main([*SAMPLE, "--output_dir", str(folder)])
    assert samples.read_text() == complete
    with pytest.raises(SystemExit, match=r"temperature was 1\.0 and is 0\.7"):
        main([*SAMPLE, "--temperature", "0.7", "--output_dir", str(folder)])


@pytest.mark.parametrize(
    ("num_correct", "sizes", "words"),
    [
        (8, ["2", "4", "8"], "Prefer --num_generations 4, the smallest"),
        (0, ["2", "8"], "No group of any of these sizes teaches the policy anything"),
        (8, ["4"], "Prefer problems solved in"),
    ],
)
def test_what_is_preferred_is_what_the_counts_carry(tmp_path, capsys, num_correct, sizes, words):
    rows = [{"num_correct": num_correct, "num_samples": 16}] * 50
    (tmp_path / "counts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["--counts", str(tmp_path / "counts.jsonl"), "--output_dir", str(tmp_path), "--num_generations", *sizes])
    assert words in capsys.readouterr().out


def test_columns_under_other_names_and_plain_prompts_train_as_they_were_sampled(tmp_path):
    data = Dataset.from_list([{"question": f"{n}+1", "solution": str(n + 1), "problem": "no"} for n in range(3)])
    data.to_parquet(str(tmp_path / "data.parquet"))
    source = ["--dataset_name", str(tmp_path / "data.parquet"), "--model_name_or_path", str(POLICY_PATH)]
    names = ["--problem_column", "question", "--answer_column", "solution", "--output_dir", str(tmp_path)]
    main([*SAMPLE, *source, *names])
    prompts, _ = to_prompts(load_split(str(tmp_path / "levels.parquet"), "train"), conversational=False)
    assert sorted(text[:3] for text in prompts["prompt"]) == ["0+1", "1+1", "2+1"]
    assert sorted(prompts["answer"]) == ["1", "2", "3"]


def scored_by_half(completions, answer, **kwargs):
    return [None if int(text) % 2 else 1.0 for text in answer]


def test_unscorable_completions_are_not_counted(tmp_path):
    reward = ["--reward_funcs", f"{__name__}.scored_by_half"]
    main([*SAMPLE, *reward, "--output_dir", str(tmp_path)])
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()[1:]]
    levels = load_dataset("parquet", data_files=str(tmp_path / "levels.parquet"), split="train")
    assert len(levels) == sum(record["num_samples"] > 0 for record in records)
    assert all(int(answer) % 2 == 0 for answer in levels["answer"])


@pytest.fixture
def reward_log(tmp_path):
    """A log of two prompts of three, each with an unscorable completion; the data set."""
    prompts = [[{"role": "user", "content": f"Say {n}."}] for n in range(3)]
    log = RewardLog(tmp_path / "run")
    log.begin(0, {"reward_names": ["right"]})
    groups = RewardSettings([1.0]).group(
        torch.tensor([[1.0], [0.0], [math.nan], [1.0], [1.0], [math.nan]]),
        3,
        lengths_PG=torch.tensor([4, 6, 8, 4, 8, 6]),
        prompt_ids_P=[prompt_id(prompts[0]), prompt_id(prompts[2])],
        is_truncated_PG=torch.zeros(6, dtype=torch.bool),
        completion_keys_PG=torch.arange(6),
    )
    log.add(groups, groups.rewards_PG, None, batch=0, step=0, mode="train")
    log.flush()
    return Dataset.from_list([{"prompt": prompt, "answer": str(n)} for n, prompt in enumerate(prompts)])


def test_from_a_reward_log(reward_log, tmp_path):
    reward_log.to_parquet(str(tmp_path / "data.parquet"))
    run = str(tmp_path / "run")
    main(["--reward_log", run, "--dataset_name", str(tmp_path / "data.parquet"), "--output_dir", str(tmp_path / "out")])
    levels = load_split(str(tmp_path / "out" / "levels.parquet"), "train")
    assert list(zip(levels["answer"], levels["num_correct"], levels["num_samples"], strict=True)) == [
        ("0", 1, 2),
        ("2", 2, 2),
    ]
    assert json.loads((tmp_path / "out" / "preflight.json").read_text())["mean_length"] == 6.0


def test_a_reward_log_of_other_problems(reward_log, tmp_path):
    """Without the data set's name there are no levels; with a wrong one there is an error."""
    main(["--reward_log", str(tmp_path / "run"), "--output_dir", str(tmp_path)])
    assert not (tmp_path / "levels.parquet").exists()
    Dataset.from_list([{"prompt": "Say 9.", "answer": "9"}]).to_parquet(str(tmp_path / "data.parquet"))
    with pytest.raises(SystemExit, match="found none of its 2 prompts there"):
        main(["--reward_log", str(tmp_path / "run"), "--dataset_name", str(tmp_path / "data.parquet")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "hot"], "invalid float value: 'hot'"),
        (["--num_samples", "0"], "invalid positive value: '0'"),
        (["--counts", "COUNTS", "--limit", "3"], "`--limit` should stand .*, found a run from `--counts`"),
        (["--num_samples_column", "n"], "found a run from `sampling`"),
        (["--subset_size", "3"], "found no `--subset`"),
        (["--subset", "7"], "should be a level from 0 to 6, found 7"),
        (["--counts", "COUNTS", "--subset", "3", "--subset_size", "99"], "found 99 and 16 problems"),
        (["--counts", "COUNTS", "--num_correct_column", "right"], "should have a column 'right'"),
        (["--counts", "COUNTS", "--num_correct_column", "answer"], "should hold counts, found '0'"),
        (["--counts", "COUNTS", "--num_generations", "1"], "should be at least 2, found 1"),
        (["--counts", "COUNTS", "--level_bounds", "0.5"], "should be 6 falling numbers"),
        (["--counts", "missing.parquet"], "found no such file"),
        (["--dataset_name", "x.parquet"], "`--model_name_or_path` should name a model"),
        (["--model_name_or_path", "nowhere/to/be"], "should be a Hub id or a local folder"),
        (["--reward_funcs", "best"], "`--reward_funcs` should hold names"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(argv, message, tmp_path):
    counts = write_rows(tmp_path)
    words = [counts if word == "COUNTS" else word for word in argv]
    with pytest.raises(SystemExit, match=message) as caught:
        main([*words, "--output_dir", str(tmp_path / "out")])
    assert str(caught.value).startswith("error: ")
    assert "\n" not in str(caught.value)
