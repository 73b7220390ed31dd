"""Data sets from files: columns, templates, and rows without an answer."""

import pytest
from datasets import Dataset

from grpo_ext.data import INSTRUCTION, load_split, to_prompts

ROWS = Dataset.from_list([{"problem": "1+1?", "answer": 2, "level": 1}, {"problem": "?", "answer": None, "level": 2}])


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl", "csv"])
def test_local_files(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        ROWS.to_parquet(str(path))
    elif suffix == "csv":
        ROWS.to_csv(str(path))
    else:
        ROWS.to_json(str(path))
    assert load_split(str(path), "train")["problem"] == ["1+1?", "?"]


def test_a_folder_has_splits(tmp_path):
    for split in ("train", "test"):
        ROWS.to_parquet(str(tmp_path / f"{split}.parquet"))
    assert len(load_split(str(tmp_path), "test")) == 2
    with pytest.raises(ValueError, match=r"split 'validation', found \['train', 'test'\]"):
        load_split(str(tmp_path), "validation")


@pytest.mark.parametrize("name", ["rows.txt", "missing.parquet"])
def test_files_that_cannot_be_read(tmp_path, name):
    if name == "rows.txt":
        (tmp_path / name).write_text("problem,answer\n")
    with pytest.raises(ValueError, match="existing file"):
        load_split(str(tmp_path / name), "train")


def test_a_problem_is_put_into_the_template():
    plain, num_skipped = to_prompts(ROWS, conversational=False)
    assert num_skipped == 1
    assert plain[0] == {"problem": "1+1?", "answer": "2", "level": 1, "prompt": f"1+1?\n{INSTRUCTION}\n"}
    chat, _ = to_prompts(ROWS, conversational=True, template="Q: {problem}")
    assert chat[0]["prompt"] == [{"content": "Q: 1+1?", "role": "user"}]


@pytest.mark.parametrize("prompt", ["Say 3.", [{"role": "user", "content": "Say 3."}]])
def test_a_prompt_is_used_as_it_is(prompt):
    prompts, _ = to_prompts(Dataset.from_list([{"prompt": prompt, "answer": "3"}]), conversational=True)
    assert prompts[0]["prompt"] == prompt


def test_other_column_names():
    rows = Dataset.from_list([{"question": "1+1?", "solution": "2"}])
    prompts, _ = to_prompts(rows, conversational=False, problem_column="question", answer_column="solution")
    assert prompts[0]["answer"] == "2"
    assert prompts[0]["prompt"].startswith("1+1?")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"problem_column": "question"},
            r"column 'question', found \['problem', 'answer', 'level'\].*--problem_column",
        ),
        ({"answer_column": "gold"}, r"column 'gold', found .*--answer_column"),
        ({"template": "no place"}, "prompt_template"),
    ],
)
def test_missing_columns_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        to_prompts(ROWS, conversational=False, **arguments)


def test_numbers_are_problems_too_and_missing_problems_are_skipped():
    rows = Dataset.from_list([{"problem": 12, "answer": "12"}, {"problem": None, "answer": "1"}])
    prompts, num_skipped = to_prompts(rows, conversational=False)
    assert (len(prompts), num_skipped) == (1, 1)
    assert prompts[0]["prompt"].startswith("12\n")


def test_a_broken_file_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "1+1?", "answer":')
    with pytest.raises(ValueError, match=r"readable as .jsonl"):
        load_split(str(path), "train")


def test_no_answered_row_is_an_error():
    with pytest.raises(ValueError, match="found none among 1"):
        to_prompts(ROWS.select([1]), conversational=False)
