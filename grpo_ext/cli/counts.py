"""Where `grpo-ext preflight` gets its success counts: a file, a reward log, or a model that it samples."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from grpo_ext.data import load_split, to_prompts
from grpo_ext.groups import SUCCESS_TOLERANCE
from grpo_ext.progress import Progress
from grpo_ext.reward_log import prompt_id, read_rows
from grpo_ext.testbed import POLICY_PATH
from grpo_ext.testbed.arithmetic import make_problems

RECORDS = "samples.jsonl"
"""The sampled counts, in the output folder."""


@dataclass
class Counts:
    """Successes and samples per problem, and the problems where they are known."""

    num_correct: list[int]
    num_samples: list[int]
    problems: Dataset | None
    """Rows that `examples/train.py` takes, one per count or, from a reward log, fewer."""
    places: list[int]
    """Which count each of these rows has."""
    mean_length: float | None = None
    """Mean number of tokens of a completion."""


def read_counts(args: argparse.Namespace) -> Counts:
    """The counts that the flags ask for."""
    if args.counts is not None:
        return from_file(args)
    return from_reward_log(args) if args.reward_log is not None else from_model(args)


def from_file(args: argparse.Namespace) -> Counts:
    """Counts of a file with one row per problem: two columns of numbers, or a list of outcomes."""
    rows = load_split(args.counts, "train")
    names = (args.num_correct_column, args.num_samples_column)
    missing = [name for name in names if name not in rows.column_names]
    if not missing:
        correct, samples = (list(rows[name]) for name in names)
        rows = rows.remove_columns(list(names))
    elif "success" in rows.column_names:
        wrong_rows = [values for values in rows["success"] if not isinstance(values, list)]
        flat = [value for values in rows["success"] for value in (values if isinstance(values, list) else [])]
        wrong_values = [value for value in flat if not isinstance(value, int | float | None)]
        if wrong_rows or wrong_values:
            raise ValueError(
                f"`success` of `{args.counts}` should be a list of numbers per problem, found "
                f"{(wrong_rows + wrong_values)[0]!r}: correct or drop the row."
            )
        outcomes = [[value for value in values if value is not None] for values in rows["success"]]
        correct = [sum(value >= 1 - SUCCESS_TOLERANCE for value in values) for values in outcomes]
        samples, rows = [len(values) for values in outcomes], rows.remove_columns("success")
    else:
        raise ValueError(
            f"`{args.counts}` should have a column {missing[0]!r}, or a list of outcomes per problem in `success`, "
            f"found {rows.column_names}: name the right ones by `--num_correct_column` and `--num_samples_column`."
        )
    wrong = next((value for value in (*correct, *samples) if not isinstance(value, int | float)), 0)
    if not isinstance(wrong, int | float):
        raise ValueError(f"`{args.counts}` should hold counts, found {wrong!r}: correct or drop the row.")
    return Counts(correct, samples, rows if rows.column_names else None, list(range(len(correct))))


def from_reward_log(args: argparse.Namespace) -> Counts:
    """Counts of a training run's reward log, which mix the policies of all its steps."""
    log = read_rows(Path(args.reward_log), mode="train")
    scored = log.filter(pc.is_finite(log["success"]))
    if len(scored) == 0:
        raise ValueError(
            f"`{args.reward_log}` should hold completions with a success, found none among {len(log)}: train with a "
            "reward in [0, 1] or with `--success_reward`."
        )
    is_correct = pc.cast(pc.greater_equal(scored["success"], 1 - SUCCESS_TOLERANCE), pa.int64())
    table = pa.table({"prompt_id": scored["prompt_id"], "is_correct": is_correct}).group_by("prompt_id")
    counts = table.aggregate([("is_correct", "sum"), ("is_correct", "count")]).sort_by("prompt_id").to_pydict()
    place_of = {name: place for place, name in enumerate(counts["prompt_id"])}
    matches = [
        (rows, [place_of.get(prompt_id(prompt)) for prompt in rows["prompt"]])
        for rows in (load_prompts(args, conversational=is_chat) for is_chat in (True, False))
    ]
    rows, found = max(matches, key=lambda match: sum(place is not None for place in match[1]))
    known = [row for row, place in enumerate(found) if place is not None]
    if not known and args.dataset_name is not None:
        raise ValueError(
            f"`--dataset_name` should hold the problems of `{args.reward_log}`, found none of its {len(place_of)} "
            "prompts there: name the data set, columns and prompt template that the run trained with."
        )
    return Counts(
        counts["is_correct_sum"],
        counts["is_correct_count"],
        to_rows(rows.select(known), args) if known else None,
        [place for place in found if place is not None],
        pc.mean(log["length"]).as_py(),
    )


def from_model(args: argparse.Namespace) -> Counts:
    """Counts of a model's own samples; one that stopped is continued."""
    from transformers import AutoTokenizer

    from grpo_ext.sampling import SamplingSettings, count_successes, explain_missing_model

    if args.model_name_or_path is None and args.dataset_name is not None:
        raise ValueError(
            "`--model_name_or_path` should name a model when `--dataset_name` is given, found none: the embedded "
            "policy reads arithmetic only."
        )
    name = args.model_name_or_path or str(POLICY_PATH)
    with explain_missing_model(name):
        is_chat = AutoTokenizer.from_pretrained(name).chat_template is not None
    # Data sets are often sorted by topic or difficulty, so the first rows are no sample of them.
    prompts = load_prompts(args, conversational=is_chat).shuffle(seed=args.seed)
    prompts = prompts.select(range(min(args.limit or len(prompts), len(prompts))))
    settings = SamplingSettings(
        args.num_samples, args.temperature, args.max_completion_length, args.batch_size, args.seed
    )
    path = Path(args.output_dir) / RECORDS
    path.parent.mkdir(parents=True, exist_ok=True)
    progress, records = Progress(len(prompts), "sampled problems"), []
    for records in count_successes(prompts, name, args.reward_funcs, settings, path):
        progress.show(len(records))
    scored = [row for row, record in enumerate(records) if record["num_samples"] > 0]
    if not scored:
        raise ValueError(f"`--reward_funcs` should score some completion, found none among {len(records)} problems.")
    return Counts(
        [records[row]["num_correct"] for row in scored],
        [records[row]["num_samples"] for row in scored],
        to_rows(prompts.select(scored), args),
        list(range(len(scored))),
        sum(record["mean_length"] for record in records) / len(records),
    )


def load_prompts(args: argparse.Namespace, *, conversational: bool) -> Dataset:
    """The prompts of the data set, or of the embedded arithmetic, as training sees them."""
    if args.dataset_name is None:
        rows = Dataset.from_list(make_problems(4096))
    else:
        rows = load_split(args.dataset_name, args.dataset_train_split, args.dataset_config)
    prompts, _ = to_prompts(
        rows,
        conversational=conversational,
        problem_column=args.problem_column,
        prompt_column=args.prompt_column,
        answer_column=args.answer_column,
        template=args.prompt_template,
    )
    return prompts


def to_rows(prompts: Dataset, args: argparse.Namespace) -> Dataset:
    """Rows that training turns into these prompts without further flags, but for a template of one's own."""
    source = args.problem_column or (None if args.prompt_column else "problem")
    if source not in prompts.column_names:
        return rename_taken(prompts, ["problem"])
    rows = prompts.remove_columns("prompt")
    return rows if source == "problem" else rename_taken(rows, ["problem"]).rename_column(source, "problem")


def rename_taken(rows: Dataset, names: list[str]) -> Dataset:
    """Gives up these column names for our own: a column `level` of the data set's becomes `original_level`."""
    return rows.rename_columns({name: f"original_{name}" for name in names if name in rows.column_names})
