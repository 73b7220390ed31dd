"""`grpo-ext preflight`: what a data set will teach a model, before a GPU is rented for it.

Long by its flags and its tables; what they show is computed in `preflight.py`, `population.py` and `difficulty.py`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from grpo_ext.cli.commands import CommandParser, one_sentence_errors, positive
from grpo_ext.cli.counts import Counts, read_counts, rename_taken
from grpo_ext.data import PROMPT_TEMPLATE
from grpo_ext.difficulty import LEVEL_BOUNDS, Levels, difficulty_levels
from grpo_ext.population import Estimate, Population, estimate_mean, fit_population
from grpo_ext.preflight import (
    MIN_GAIN,
    NOTHING,
    CollapseForecast,
    forecast_collapse,
    informative_range,
    preferred_num_generations,
)
from grpo_ext.progress import show_progress

FILE_FLAGS = ("num_correct_column", "num_samples_column")
DATA_FLAGS = (
    *("dataset_name", "dataset_config", "dataset_train_split", "problem_column", "prompt_column", "answer_column"),
    "prompt_template",
)
SAMPLING_FLAGS = (
    *("model_name_or_path", "num_samples", "limit", "temperature", "max_completion_length", "batch_size"),
    "reward_funcs",
)


def make_parser() -> CommandParser:
    """The flags; those of the data and the model are named as `grpo-ext train` names them."""
    parser = CommandParser(
        "preflight",
        "Estimates, from success counts per problem, how many groups will collapse at each group size, which size and "
        "difficulty to prefer, and every problem's level. The counts come from a file, from the reward log of a run, "
        "or, without either, from sampling the model on the data set.",
    )
    add = parser.add_argument_group("the counts").add_argument
    add("--counts", help="File with a row per problem: parquet, json, jsonl or csv.")
    add("--num_correct_column", default="num_correct", help="Column of successes; else a list column `success`.")
    add("--num_samples_column", default="num_samples", help="Column of samples.")
    add("--reward_log", help="Output folder of a run that logged its rewards.")
    add = parser.add_argument_group("the problems").add_argument
    add("--dataset_name", help="Hub id or file; unset: the embedded arithmetic.")
    add("--dataset_config", help="Configuration of the Hub data set.")
    add("--dataset_train_split", default="train", help="Split.")
    add("--problem_column", help="Column put into the prompt template; unset: problem, if there is one.")
    add("--prompt_column", help="Column used as the prompt as it is; unset: prompt.")
    add("--answer_column", default="answer", help="Column with the reference answer.")
    add("--prompt_template", default=PROMPT_TEMPLATE, help="Text around {problem}.")
    add = parser.add_argument_group("sampling").add_argument
    add("--model_name_or_path", help="Hub id or folder; unset: the embedded policy.")
    add("--num_samples", type=positive, default=16, help="Completions per problem.")
    add("--limit", type=positive, help="Number of problems, drawn by --seed; unset: all.")
    add("--temperature", type=float, default=1.0, help="Sampling temperature.")
    add("--max_completion_length", type=positive, default=256, help="Tokens per completion.")
    add("--batch_size", type=positive, default=8, help="Problems per call of generate.")
    add("--reward_funcs", default="boxed_accuracy", help="The reward function, by name or dotted path; 1 is right.")
    add = parser.add_argument_group("the result").add_argument
    add("--num_generations", type=positive, nargs="+", default=[2, 4, 8, 16, 32], help="Group sizes.")
    add("--level_bounds", type=float, nargs="+", default=list(LEVEL_BOUNDS), help="Success rates between levels.")
    add("--subset", type=int, help="Write the problems of this level as a data set of their own.")
    add("--subset_size", type=positive, help="How many of them, drawn by --seed; unset: all.")
    add("--seed", type=int, default=42, help="Of the sampling and of what is drawn.")
    add("--output_dir", default="outputs/preflight", help="Folder of what is written.")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags, without those that nothing would read."""
    parser = make_parser()
    args = parser.parse_args(argv)
    unread: tuple[str, ...] = () if args.counts else FILE_FLAGS
    if args.counts:
        unread += ("reward_log", *DATA_FLAGS, *SAMPLING_FLAGS)
    elif args.reward_log:
        unread += SAMPLING_FLAGS
    unread += () if args.subset is not None else ("subset_size",)
    changed = [name for name in unread if vars(args)[name] != parser.get_default(name)]
    if changed:
        source = "--counts" if args.counts else "--reward_log" if args.reward_log else "sampling"
        found = "no `--subset`" if changed[0] == "subset_size" else f"a run from `{source}`"
        raise ValueError(f"`--{changed[0]}` should stand where something reads it, found {found}: drop it.")
    if args.subset is not None and not 0 <= args.subset <= len(LEVEL_BOUNDS):
        raise ValueError(
            f"`--subset` should be a level from 0 to {len(LEVEL_BOUNDS)}, found {args.subset}: pick one of these."
        )
    args.num_generations = sorted(set(args.num_generations))
    return args


def forecast_all(population: Population, sizes: list[int]) -> list[CollapseForecast]:
    """The forecasts of all group sizes."""
    sizes_shown = show_progress(sizes, "forecast group sizes")
    return [forecast_collapse(population, size) for size in sizes_shown]


def percent(estimate: Estimate) -> str:
    """`54.1 % (52.0 to 56.3)`."""
    return f"{100 * estimate.value:5.1f} % ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def collapse_table(forecasts: list[CollapseForecast], mean_length: float | None) -> str:
    """A line per group size."""
    heading = f"{'G':>3}  {'groups that collapse':<24}{'all correct':<24}{'all incorrect':<24}cost of one that does not"
    lines = [heading]
    for forecast in forecasts:
        shares = (forecast.rate, forecast.all_correct, forecast.all_incorrect)
        cost = f"{forecast.cost.value:.1f} completions ({forecast.cost.low:.1f} to {forecast.cost.high:.1f})"
        if mean_length is not None:
            cost += f", {forecast.cost.value * mean_length:,.0f} tokens"
        lines.append(f"{forecast.num_generations:>3}  {''.join(f'{percent(share):<24}' for share in shares)}{cost}")
    return "\n".join(lines)


def level_table(levels: Levels, bounds: list[float]) -> str:
    """A line per level, with its number of problems and of those that can be of no other."""
    limits = [1.0, *bounds, 0.0]
    is_certain_P = levels.level_low_P == levels.level_high_P
    lines = [f"level  {'success rate':<18}{'problems':>8}  certain"]
    for level, (high, low) in enumerate(itertools.pairwise(limits)):
        is_here_P = levels.level_P == level
        rates = f"{100 * low:g} to {100 * high:g} %"
        lines.append(f"{level:>5}  {rates:<18}{is_here_P.sum():>8}  {(is_here_P & is_certain_P).sum():>7}")
    return "\n".join(lines)


def preference(population: Population, forecasts: list[CollapseForecast]) -> dict[str, Any]:
    """The group size and difficulty to prefer, and the share of the problems that have it."""
    size = preferred_num_generations(forecasts)
    low, high = informative_range(size or forecasts[-1].num_generations)
    is_inside_J = ((population.grid_J >= low) & (population.grid_J <= high)).astype(float)
    share = dataclasses.asdict(estimate_mean(population, is_inside_J))
    return {"num_generations": size, "success_rate": [low, high], "share_of_problems": share}


def preference_sentence(preferred: dict[str, Any], forecasts: list[CollapseForecast]) -> str:
    """What to prefer, and why."""
    low, high = preferred["success_rate"]
    gain = f"{100 * MIN_GAIN:.0f} % more groups informative"
    if preferred["num_generations"] is not None:
        size = (
            f"Prefer --num_generations {preferred['num_generations']}, the smallest of these from which doubling makes "
        )
        size += f"less than {gain}, and"
    elif 1 - forecasts[-1].rate.value < NOTHING:
        size = "No group of any of these sizes teaches the policy anything: take other problems. Prefer"
    elif len(forecasts) == 1:
        size = "Prefer"
    else:
        size = f"None of these --num_generations is large enough: each doubling makes at least {gain}. "
        size += "At the largest, prefer"
    return (
        f"{size} problems solved in {100 * low:.0f} to {100 * high:.0f} % of the samples, whose groups collapse every "
        f"second time at most: {percent(Estimate(**preferred['share_of_problems'])).strip()} of these problems."
    )


def with_levels(counts: Counts, problems: Dataset, levels: Levels) -> Dataset:
    """The problems with what is known of their difficulty; a column of the same name becomes `original_...`."""
    places = counts.places
    columns = {
        "level": levels.level_P[places],
        "level_low": levels.level_low_P[places],
        "level_high": levels.level_high_P[places],
        "success_rate": levels.success_rate_P[places],
        "num_correct": [int(counts.num_correct[place]) for place in places],
        "num_samples": [int(counts.num_samples[place]) for place in places],
    }
    return concatenate_datasets([rename_taken(problems, list(columns)), Dataset.from_dict(columns)], axis=1)


def write_data(rows: Dataset, args: argparse.Namespace, folder: Path) -> list[Path]:
    """Writes the problems with their levels, and the subset where one was asked for."""
    paths = [folder / "levels.parquet"]
    rows.to_parquet(str(paths[0]))
    if args.subset is not None:
        of_level = [row for row, level in enumerate(rows["level"]) if level == args.subset]
        size = args.subset_size or len(of_level)
        if not 0 < size <= len(of_level):
            raise ValueError(
                f"`--subset_size` should be at most the number of problems of level {args.subset}, found {size} and "
                f"{len(of_level)} problems: lower it, choose another `--subset`, or sample more problems."
            )
        paths.append(folder / f"level{args.subset}-{size}.parquet")
        rows.select(of_level).shuffle(seed=args.seed).select(range(size)).to_parquet(str(paths[1]))
    return paths


def finite(value: Any) -> Any:
    """The value with null for what is infinite, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def preflight(args: argparse.Namespace) -> None:
    """Counts, forecasts, shows and writes."""
    counts = read_counts(args)
    levels = difficulty_levels(counts.num_correct, counts.num_samples, args.level_bounds)
    population = fit_population(counts.num_correct, counts.num_samples)
    forecasts = forecast_all(population, args.num_generations)
    preferred = preference(population, forecasts)
    samples = sum(map(int, counts.num_samples))
    say(f"{len(counts.num_correct)} problems, {samples} samples; values with their 95 % intervals.\n")
    say(collapse_table(forecasts, counts.mean_length) + "\n")
    say(preference_sentence(preferred, forecasts) + "\n")
    say(level_table(levels, args.level_bounds) + "\n")
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "settings": vars(args),
        "num_problems": len(counts.num_correct),
        "num_samples": samples,
        "mean_length": counts.mean_length,
        "collapse": [dataclasses.asdict(forecast) for forecast in forecasts],
        "preferred": preferred,
        "problems_by_level": np.bincount(levels.level_P, minlength=len(LEVEL_BOUNDS) + 1).tolist(),
    }
    paths = [folder / "preflight.json"]
    paths[0].write_text(json.dumps(finite(result), indent=2) + "\n")
    if counts.problems is not None:
        paths += write_data(with_levels(counts, counts.problems, levels), args, folder)
    elif args.subset is not None:
        raise ValueError("`--subset` should stand beside the problems, found none: name them by `--dataset_name`.")
    say(f"Wrote {', '.join(map(str, paths))}.")


def say(text: str) -> None:
    """Prints."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    if not sys.stderr.isatty():
        # Bars that redraw themselves make a log file unreadable.
        disable_progress_bars()
        disable_progress_bar()
    preflight(parse(sys.argv[1:] if argv is None else argv))
