"""The command line of `grpo-ext train`: its flags, its defaults, and what it refuses."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from trl import ModelConfig, TrlParser

from grpo_ext.advantages import METHODS
from grpo_ext.cli.flags import (
    build,
    explain_unknown,
    extra_generations,
    given_values,
    method_arguments,
    split_config,
)
from grpo_ext.config import AdvantageGRPOConfig
from grpo_ext.data import PROMPT_TEMPLATE
from grpo_ext.early_warning import RULES
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.resolution import find_method
from grpo_ext.rewards import REWARDS
from grpo_ext.testbed import POLICY_PATH


@dataclass
class TrainArguments:
    """What to train on what; the method, the training and the model have flags of their own."""

    _argument_group_name = "the run"

    method: str = field(
        default="grpo",
        metadata={"help": f"Advantage estimator: {', '.join(METHODS)}, or your own class as package.module:Class."},
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, or a parquet, json, jsonl or csv file or folder; unset: the embedded arithmetic."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the Hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on, with --eval_strategy."})
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "Another data set for evaluation; unset: the training one's test split."}
    )
    problem_column: str | None = field(
        default=None, metadata={"help": "Column put into the prompt template; unset: problem, if there is one."}
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column used as the prompt as it is, plain or conversational; unset: prompt."}
    )
    answer_column: str = field(default="answer", metadata={"help": "Column with the reference answer."})
    prompt_template: str = field(default=PROMPT_TEMPLATE, metadata={"help": "Text around {problem}."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["boxed_accuracy"],
        metadata={
            "help": f"Reward functions: {', '.join(REWARDS)}, or dotted paths such as my_lib.rewards.my_reward; "
            "their weights: --reward_weights."
        },
    )
    stop_on: list[str] = field(
        default_factory=list, metadata={"help": f"Early warnings at which training stops: {', '.join(RULES)}."}
    )


@dataclass
class ModelArguments(ModelConfig):
    """TRL's arguments of the model, under a heading of their own."""

    _argument_group_name = "the model (TRL's ModelConfig)"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling per flag, and lines that fill the screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.nargs == "?":  # a switch: `--use_peft` and `--use_peft true` mean the same
            return action.option_strings[0]
        spellings = action.option_strings
        action.option_strings = spellings[:1]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = spellings


class TrainParser(TrlParser):
    """Says what is wrong in one sentence instead of printing every flag there is."""

    def read_config(self, config: dict[str, Any]) -> list[str]:
        """
        Takes a configuration's values as defaults, checked as if they stood on the command line.

        Returns:
            `list[str]`: the flags that do not exist.
        """
        for name, value in dict(config.pop("env", {})).items():
            os.environ[name] = str(value)
        texts = {
            name: str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
            for name, value in config.items()
        }
        return self.set_defaults_with_config(**texts)[::2]

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"The command line should be valid, found {message}: see `--help`.")


@dataclass
class Run:
    """A parsed command line."""

    script: TrainArguments
    training: AdvantageGRPOConfig
    model: ModelConfig
    estimator: AdvantageEstimator


def parse(argv: list[str]) -> Run:
    """
    Parses a command line, with the flags of the method it names.

    Raises:
        `ValueError`: in one sentence, for whatever does not fit.
    """
    words, config = split_config(argv)
    given = given_values(words, config)
    method = find_method(str(given.get("method") or "grpo"))
    arguments = method_arguments(method, given)
    parser = TrainParser(
        (TrainArguments, arguments, ModelArguments, AdvantageGRPOConfig),
        prog="grpo-ext train",
        usage="accelerate launch examples/train.py --method NAME [--flag value ...] [--config file.yaml]",
        description="Trains a policy by GRPO with the advantage estimator of your choice, and without further flags "
        "the embedded policy on embedded arithmetic. The flags you will want first: --method, --model_name_or_path, "
        "--dataset_name, --num_generations, --learning_rate, --max_steps, --max_completion_length, --use_peft, "
        "--eval_strategy, --output_dir, --resume_from_checkpoint.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(**defaults(given, extra_generations(method, given)))
    unknown_keys = parser.read_config(config)
    script, values, model, training, unknown = parser.parse_args_and_config(words, return_remaining_strings=True)
    unknown = unknown_keys + unknown
    if unknown:
        known = [action.dest for action in parser._actions]
        raise ValueError(explain_unknown(unknown[0], given, known))
    estimator = build(method, vars(values))
    if model.model_name_or_path is None and script.dataset_name is not None:
        raise ValueError(
            "`--model_name_or_path` should name a model when `--dataset_name` is given, found none: the embedded "
            "policy reads arithmetic only."
        )
    model.model_name_or_path = model.model_name_or_path or str(POLICY_PATH)
    return Run(script, training, model, cast(AdvantageEstimator, estimator))


def defaults(given: dict[str, Any], extra: int) -> dict[str, Any]:
    """The method's number of extra completions, and what suits the embedded policy; an explicit flag always wins."""
    general = {
        "num_extra_generations": extra,
        "output_dir": f"outputs/{given.get('method') or 'grpo'}".replace(":", "_"),
    }
    if given.get("model_name_or_path"):
        return general
    num_generations = read_number(given, "num_generations", 8)
    return general | {
        "learning_rate": 1e-4,
        "max_steps": 100,
        "per_device_train_batch_size": 4 * (num_generations + extra),
        "gradient_accumulation_steps": 4,
        "per_device_eval_batch_size": 16 * read_number(given, "num_generations_eval", num_generations),
        "max_completion_length": 32,
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 5,
        "eval_steps": 50,
        "save_steps": 50,
    }


def read_number(given: dict[str, Any], name: str, default: int) -> int:
    """A given whole number; the default where there is none, or none that the parser will accept."""
    text = str(given.get(name, ""))
    return int(text) if text.isdecimal() and int(text) > 0 else default


def check_usage(run: Run) -> None:
    """Refuses settings that nothing would read."""
    script, is_evaluated, default = run.script, run.training.eval_strategy != "no", TrainArguments()
    parts = ("dataset_config", "dataset_train_split", "dataset_test_split")
    columns = ("problem_column", "prompt_column", "answer_column")
    changed = [name for name in (*parts, *columns) if vars(script)[name] != vars(default)[name]]
    if changed and script.dataset_name is None and script.eval_dataset_name is None:
        refuse(changed[0], "come with `--dataset_name`, found the embedded task", "drop it, or name a data set")
    if script.eval_dataset_name is not None and not is_evaluated:
        refuse("eval_dataset_name", "come with `--eval_strategy`, found none", "add `--eval_strategy steps`")
    if script.problem_column is not None and script.prompt_column is not None:
        refuse("prompt_column", "not stand beside `--problem_column`, found both", "drop one of the two")
    if script.dataset_name is None or not Path(script.dataset_name).is_file():
        return
    if changed and changed[0] in parts:
        found = f"found the file {script.dataset_name}"
        refuse(changed[0], f"name a part of a Hub data set or folder, {found}", "drop it")
    if is_evaluated and script.eval_dataset_name is None:
        refuse("eval_dataset_name", "name a second file where the data set is a single one, found none", "add one")


def refuse(flag: str, should: str, remedy: str) -> NoReturn:
    """Raises the one-sentence error about a flag."""
    raise ValueError(f"`--{flag}` should {should}: {remedy}.")
