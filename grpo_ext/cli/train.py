"""`grpo-ext train` and `examples/train.py`: one command from a method's name to a trained model and its curve."""

import contextlib
import sys
import time
import traceback
import warnings
from pathlib import Path

from accelerate import Accelerator, PartialState
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, ProgressCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import get_peft_config, get_quantization_config

from grpo_ext.callbacks import AdvantageCollapseCallback, EarlyWarningCallback
from grpo_ext.cli.arguments import Run, check_usage, parse
from grpo_ext.cli.report import ProgressLines, save_picture, summary_table
from grpo_ext.data import load_split, to_prompts
from grpo_ext.rewards import find_reward
from grpo_ext.sampling import explain_missing_model
from grpo_ext.testbed.arithmetic import make_problems
from grpo_ext.trainer import AdvantageGRPOTrainer


def load_data(run: Run, split: str, name: str | None, conversational: bool) -> Dataset:
    """Prompts of a split of the data set, or of the embedded arithmetic."""
    script = run.script
    if name is None:
        rows = Dataset.from_list(
            make_problems(4096 if split == "train" else 128, "train" if split == "train" else "test")
        )
    else:
        rows = load_split(name, split, script.dataset_config if name == script.dataset_name else None)
    prompts, num_skipped = to_prompts(
        rows,
        conversational=conversational,
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


def has_chat_template(run: Run) -> bool:
    """Whether the model's tokenizer has a chat template, so that a problem becomes a user's message."""
    name = run.model.model_name_or_path
    settings = {"revision": run.model.model_revision, "trust_remote_code": trusts_remote_code(run)}
    with explain_missing_model(str(name)):
        return AutoTokenizer.from_pretrained(name, **settings).chat_template is not None


def make_trainer(run: Run) -> AdvantageGRPOTrainer:
    """The trainer of a run, with our callbacks in the place of transformers' printing ones."""
    training, model = run.training, run.model
    check_usage(run)
    is_chat = has_chat_template(run)
    test_split = None
    if training.eval_strategy != "no":
        source = run.script.eval_dataset_name or run.script.dataset_name
        test_split = load_data(run, run.script.dataset_test_split, source, is_chat)
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
        train_dataset=load_data(run, run.script.dataset_train_split, run.script.dataset_name, is_chat),
        eval_dataset=test_split,
        peft_config=get_peft_config(model),
        callbacks=[ProgressLines(), AdvantageCollapseCallback(), EarlyWarningCallback(stop_on=run.script.stop_on)],
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
    if trainer.state.global_step < trainer.state.max_steps:
        steps = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
        is_saved = (folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}").is_dir()
        say(f"Stopped after {steps}{': `--resume_from_checkpoint true` goes on from there' if is_saved else ''}.")
    trainer.save_model(run.training.output_dir)
    trainer.save_state()
    say(summary_table(trainer.state.log_history, seconds))
    if trainer.accelerator.is_main_process:
        picture = save_picture(trainer.state.log_history, folder, trainer.advantage_estimator.identity())
        curves = f"curves in {picture}" if picture else "for curves `pip install 'grpo-ext[plot]'`"
        say(f"Model in {folder}, {curves}.")
    if run.training.push_to_hub:
        trainer.push_to_hub(dataset_name=run.script.dataset_name)
    end(trainer.accelerator)


def end(accelerator: Accelerator) -> None:
    """
    Leaves the other processes. Threads of gloo's outlive the process group, and one of them that lets go of its last
    tensor while Python ends aborts the process, which makes a launcher call the finished run failed: so they get
    the time to do it before.
    """
    accelerator.end_training()
    if accelerator.num_processes > 1:
        time.sleep(0.2)


def is_ours(error: Exception) -> bool:
    """Whether grpo_ext itself raised the error, so that its sentence says all there is to say."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])


def main(argv: list[str] | None = None) -> None:
    """Runs the command line; a mistake of the user's ends in one sentence and exit code 1."""
    for old_name in (".*gradient_checkpointing.*", "`torch.distributed.*` is deprecated.*"):
        warnings.filterwarnings("ignore", message=old_name, category=FutureWarning)
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
