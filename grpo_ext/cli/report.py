"""What a training run shows: one line per logging step, a table at the end, and a picture."""

from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_ext.pictures import MatplotlibMissingError, draw_run
from grpo_ext.run_history import from_logs

PICTURE = "reward_and_collapse.png"


class ProgressLines(TrainerCallback):
    """A progress bar on a terminal, and one readable line per logging step everywhere."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            # `disable=None` hides the bar where the output is no terminal.
            self._bar = tqdm(total=state.max_steps, initial=state.global_step, desc="train", disable=None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero:
            line = describe_step(logs, state.global_step, state.max_steps)
            if line:
                tqdm.write(line)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def describe_step(logs: dict[str, float], step: int, max_steps: int) -> str | None:
    """The numbers of a logging step that a person wants to see, None where there are none."""
    prefix = "eval_" if "eval_reward" in logs else ""
    if f"{prefix}reward" not in logs:
        return None
    value = {name.removeprefix(prefix): number for name, number in logs.items() if number is not None}
    parts = [f"{'eval' if prefix else 'step'} {step:>{len(str(max_steps))}}/{max_steps}"]
    if "reward" in value:
        parts.append(f"reward {value['reward']:.3f}")
    if "acr/rate" in value:
        causes = f"{value['acr/all_correct']:.0%} all correct, {value['acr/all_incorrect']:.0%} all incorrect"
        parts.append(f"collapse {value['acr/rate']:.0%} ({causes}), {value['acr/after']:.0%} after")
    parts.append(f"length {value.get('completions/mean_length', float('nan')):.0f}")
    for name, label in (("entropy", "entropy"), ("entropy_live", "live entropy")):
        if name in value:
            parts.append(f"{label} {value[name]:.2f}")
    if "compact/padded_tokens" in value:
        stock = value["compact/padded_tokens"] + value["compact/padded_tokens_saved"]
        parts.append(f"update {value['compact/padded_tokens'] / stock:.0%} of the tokens")
    if "step_time" in value:
        parts.append(f"{value['step_time']:.1f} s/step")
    return "  ".join(parts)


def summary_table(history: list[dict[str, float]], seconds: float) -> str:
    """Reward and collapse at the first and the last logging step, and the seconds of training."""
    lines = [f"{'':<28}{'first':>10}{'last':>10}"]
    for label, name in (
        ("reward", "reward"),
        ("collapsed groups", "acr/rate"),
        ("  all correct", "acr/all_correct"),
        ("  all incorrect", "acr/all_incorrect"),
        ("without signal after method", "acr/after"),
        ("evaluation reward", "eval_reward"),
    ):
        values = [entry[name] for entry in history if entry.get(name) is not None]
        if values:
            lines.append(f"{label:<28}{values[0]:>10.3f}{values[-1]:>10.3f}")
    lines.append(f"{'seconds':<28}{'':>10}{seconds:>10.1f}")
    return "\n".join(lines)


def save_picture(history: list[dict[str, float]], folder: Path, title: str) -> Path | None:
    """The reward and collapse curves as PNG; None where matplotlib is missing or nothing was logged."""
    run = from_logs(history, title)
    if not run.causes:
        return None
    try:
        figure = draw_run(run)
    except MatplotlibMissingError:
        return None
    path = folder / PICTURE
    figure.savefig(path, dpi=120)
    return path
