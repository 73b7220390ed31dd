"""Problems with verifiable answers, from the Hub or a file, as the prompts that TRL trains on."""

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""The instruction of the Qwen2.5-Math prompt, which the papers use."""

PROMPT_TEMPLATE = "{problem}\n" + INSTRUCTION

FILE_FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def load_split(name: str, split: str, config: str | None = None) -> Dataset:
    """
    One split of a data set.

    Args:
        name (`str`):
            Hub id, or path of a parquet, json, jsonl or csv file or of a folder of them. A single file is one split,
            whatever `split` says.
        split (`str`):
            Name of the split.
        config (`str`, *optional*):
            Name of the Hub data set's configuration.

    Raises:
        `ValueError`: for a missing file, an unknown file format or a missing split.
    """
    path = Path(name)
    if path.is_file() or path.suffix in FILE_FORMATS:
        if path.suffix not in FILE_FORMATS or not path.is_file():
            raise ValueError(
                f"`{name}` should be an existing file of one of the formats {', '.join(FILE_FORMATS)}, found "
                f"{'another format' if path.is_file() else 'no such file'}: check the path."
            )
        try:
            return load_dataset(FILE_FORMATS[path.suffix], data_files=str(path), split="train")
        except DatasetGenerationError as error:
            raise ValueError(
                f"`{name}` should be readable as {path.suffix}, found {error.__cause__ or error}."
            ) from error
    splits = load_dataset(name, config)
    if not isinstance(splits, DatasetDict) or split not in splits:
        raise ValueError(
            f"`{name}` should have a split {split!r}, found {list(splits)}: choose one by `--dataset_train_split` or "
            "`--dataset_test_split`, or name another data set for evaluation by `--eval_dataset_name`."
        )
    return splits[split]


def to_prompts(
    rows: Dataset,
    *,
    conversational: bool,
    problem_column: str | None = None,
    prompt_column: str | None = None,
    answer_column: str = "answer",
    template: str = PROMPT_TEMPLATE,
) -> tuple[Dataset, int]:
    """
    Adds `prompt` and `answer` columns; rows without a prompt or an answer are left out.

    Args:
        rows (`datasets.Dataset`):
            Rows with a problem or a prompt, and an answer.
        conversational (`bool`):
            Whether a problem becomes a user message (for a tokenizer with a chat template) or plain text.
        problem_column (`str`, *optional*):
            Column put into the template. None: `problem`, if there is one.
        prompt_column (`str`, *optional*):
            Column used as it is, plain or conversational, where no problem column is found. None: `prompt`.
        answer_column (`str`, *optional*, defaults to `"answer"`):
            Column with the reference answer.
        template (`str`, *optional*):
            Text around `{problem}`.

    Returns:
        `tuple[Dataset, int]`: the prompts, all other columns kept, and the number of rows left out.

    Raises:
        `ValueError`: for a missing column, or where no row is left.
    """
    if problem_column is None and prompt_column is None and "problem" in rows.column_names:
        problem_column = "problem"
    source = problem_column or prompt_column or "prompt"
    for column, flag in ((source, "problem_column"), (answer_column, "answer_column")):
        if column not in rows.column_names:
            raise ValueError(
                f"The data set should have a column {column!r}, found {rows.column_names}: name the right one by "
                f"`--{flag}`" + (" or `--prompt_column`." if flag == "problem_column" else ".")
            )
    if problem_column is not None and "{problem}" not in template:
        raise ValueError(
            f"`prompt_template` should contain {{problem}}, found {template!r}: say where the problem belongs."
        )

    def to_prompt(value: Any) -> Any:
        if problem_column is None:
            return value
        text = template.replace("{problem}", str(value))
        return [{"role": "user", "content": text}] if conversational else text + "\n"

    def is_complete(prompt: Any, answer: Any) -> bool:
        return prompt is not None and answer is not None and str(answer).strip() != ""

    answered = rows.filter(is_complete, input_columns=[source, answer_column])
    if len(answered) == 0:
        raise ValueError(
            f"The data set should have rows with an answer, found none among {len(rows)}: check `--answer_column`."
        )
    columns = {
        "prompt": [to_prompt(value) for value in answered[source]],
        "answer": [str(value) for value in answered[answer_column]],
    }
    others = answered.remove_columns([name for name in columns if name in rows.column_names])
    parts = [Dataset.from_dict(columns), *([others] if others.column_names else [])]
    return concatenate_datasets(parts, axis=1), len(rows) - len(answered)
