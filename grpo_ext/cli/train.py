"""`grpo-ext train` and `examples/train.py`: one command from a method's name to a trained model and its curve."""

import argparse
import contextlib
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl import rewards as trl_rewards

from grpo_ext.advantages import METHODS
from grpo_ext.callbacks import AdvantageCollapseCallback
from grpo_ext.cli.flags import (
    build,
    explain_unknown,
    extra_generations,
    given_values,
    method_arguments,
    split_config,
)
from grpo_ext.cli.report import ProgressLines, save_picture, summary_table
from grpo_ext.config import AdvantageGRPOConfig
from grpo_ext.data import PROMPT_TEMPLATE, load_split, to_prompts
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.resolution import find_method
from grpo_ext.rewards import boxed_accuracy
from grpo_ext.testbed import POLICY_PATH
from grpo_ext.testbed.arithmetic import make_problems
from grpo_ext.trainer import AdvantageGRPOTrainer

REWARDS: dict[str, Callable] = {
    "boxed_accuracy": boxed_accuracy,
    "accuracy_reward": trl_rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": trl_rewards.think_format_reward,
}


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
        metadata={"help": "Hub id, or a local parquet, json or jsonl file or folder; unset: the embedded arithmetic."},
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
    script, is_evaluated = run.script, run.training.eval_strategy != "no"
    default = TrainArguments()
    sources = ("dataset_config", "dataset_train_split", "dataset_test_split", "problem_column", "prompt_column")
    for name in (*sources, "answer_column"):
        if (
            script.dataset_name is None
            and script.eval_dataset_name is None
            and vars(script)[name] != vars(default)[name]
        ):
            refuse(name, "come with `--dataset_name`, found the embedded task", "drop it, or name a data set")
    if script.eval_dataset_name is not None and not is_evaluated:
        refuse("eval_dataset_name", "come with `--eval_strategy`, found none", "add `--eval_strategy steps`")
    if script.problem_column is not None and script.prompt_column is not None:
        refuse("prompt_column", "not stand beside `--problem_column`, found both", "drop one of the two")
    if script.dataset_name is None or not Path(script.dataset_name).is_file():
        return
    for name in ("dataset_config", "dataset_train_split", "dataset_test_split"):
        if vars(script)[name] != vars(default)[name]:
            refuse(name, f"name a part of a Hub data set or folder, found the file {script.dataset_name}", "drop it")
    if is_evaluated and script.eval_dataset_name is None:
        refuse("eval_dataset_name", "name a second file where the data set is a single one, found none", "add one")


def refuse(flag: str, should: str, remedy: str) -> NoReturn:
    """Raises the one-sentence error about a flag."""
    raise ValueError(f"`--{flag}` should {should}: {remedy}.")


def load_data(run: Run, split: str, name: str | None) -> Dataset:
    """Prompts of a split of the data set, or of the embedded arithmetic."""
    script = run.script
    if name is None:
        rows = Dataset.from_list(
            make_problems(4096 if split == "train" else 128, "train" if split == "train" else "test")
        )
    else:
        rows = load_split(name, split, script.dataset_config if name == script.dataset_name else None)
    tokenizer = load_tokenizer(run)
    prompts, num_skipped = to_prompts(
        rows,
        conversational=tokenizer.chat_template is not None,
        problem_column=script.problem_column,
        prompt_column=script.prompt_column,
        answer_column=script.answer_column,
        template=script.prompt_template,
    )
    if num_skipped:
        say(f"{name}: skipped {num_skipped} of {len(rows)} rows, which have no prompt or answer.")
    return prompts


def trusts_remote_code(run: Run) -> bool:
    """TRL's flag, which belonged to the model's arguments before it moved to the training's."""
    return bool(vars(run.training).get("trust_remote_code", vars(run.model).get("trust_remote_code", False)))


def load_tokenizer(run: Run) -> Any:
    """The model's tokenizer, to see whether it has a chat template."""
    name = run.model.model_name_or_path
    settings = {"revision": run.model.model_revision, "trust_remote_code": trusts_remote_code(run)}
    try:
        return AutoTokenizer.from_pretrained(name, **settings)
    except OSError as error:
        raise ValueError(
            f"`--model_name_or_path` should be a Hub id or a local folder, found {name!r}, which cannot be loaded: "
            f"{error}"
        ) from error


def find_reward(name: str) -> Callable:
    """A reward function by its name or dotted path."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        reward = getattr(importlib.import_module(module), function)
        if not callable(reward):
            raise ValueError("it is no function")
        return reward
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`--reward_funcs` should hold names among {', '.join(REWARDS)} or dotted paths, found {name!r} ({error}): "
            "check the spelling."
        ) from error


def make_trainer(run: Run) -> AdvantageGRPOTrainer:
    """The trainer of a run, with our callbacks in the place of transformers' printing ones."""
    training, model = run.training, run.model
    check_usage(run)
    test_split = None
    if training.eval_strategy != "no":
        test_split = load_data(
            run, run.script.dataset_test_split, run.script.eval_dataset_name or run.script.dataset_name
        )
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "trust_remote_code": trusts_remote_code(run),
        **(training.model_init_kwargs or {}),
    }
    quantization = get_quantization_config(model)
    if quantization is not None:
        training.model_init_kwargs.setdefault("quantization_config", quantization)
    trainer = AdvantageGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=[find_reward(name) for name in run.script.reward_funcs],
        args=training,
        train_dataset=load_data(run, run.script.dataset_train_split, run.script.dataset_name),
        eval_dataset=test_split,
        peft_config=get_peft_config(model),
        callbacks=[ProgressLines(), AdvantageCollapseCallback()],
        advantage_estimator=run.estimator,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def say(text: str) -> None:
    """Prints on the main process."""
    if PartialState().is_main_process:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def train(run: Run, trainer: AdvantageGRPOTrainer) -> None:
    """Trains, saves the model, and shows what happened."""
    folder = Path(run.training.output_dir)
    say(f"Training with {trainer.advantage_estimator.identity()} into {folder}.")
    resume: str | bool | None = run.training.resume_from_checkpoint
    if str(resume).lower() in ("true", "false"):
        resume = str(resume).lower() == "true"
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    seconds = time.perf_counter() - start
    trainer.save_model(run.training.output_dir)
    trainer.save_state()
    say(summary_table(trainer.state.log_history, seconds))
    if trainer.accelerator.is_main_process:
        picture = save_picture(trainer.state.log_history, folder, trainer.advantage_estimator.identity())
        curves = f"curves in {picture}" if picture else "for curves `pip install 'grpo-ext[plot]'`"
        say(f"Model in {folder}, {curves}.")
    if run.training.push_to_hub:
        trainer.push_to_hub(dataset_name=run.script.dataset_name)
    trainer.accelerator.end_training()


def is_ours(error: Exception) -> bool:
    """Whether grpo_ext itself raised the error, so that its sentence says all there is to say."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; a mistake of the user's ends in one sentence and exit code 1."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    made: list[Path] = []
    is_set_up = False
    try:
        run = parse(sys.argv[1:] if argv is None else argv)
        output = Path(run.training.output_dir)
        made = [folder for folder in (output, *output.parents) if not folder.exists()]
        trainer = make_trainer(run)
        is_set_up = True
        train(run, trainer)
    except (ValueError, OSError) as error:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where it is empty
        if is_set_up and not is_ours(error):
            raise
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
