"""The reward log: what it holds, what a crash costs, and what a resumed run replaces."""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from _launch import environment
from _training import DATA, even_digits, make_args, make_trainer
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.advantages import HADW, MCGRPO, METHODS
from grpo_ext.callbacks import AdvantageCallback
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups, RewardSettings
from grpo_ext.replay import replay_run
from grpo_ext.resolution import from_spec, to_spec
from grpo_ext.reward_log import (
    LoggedBatch,
    RewardLog,
    has_log,
    prompt_id,
    read_attempts,
    read_batches,
    read_rows,
    reader,
    to_text,
    writer,
)
from grpo_ext.watching import watch_rewards

RUN = {"reward_names": ["right", "short"], "max_steps": 10} | vars(RewardSettings([1.0, 0.5]))


def make_groups(seed: int, num_groups: int = 2, num_generations: int = 3) -> RewardGroups:
    """A batch of two reward functions, one of which sometimes abstains."""
    generator = torch.Generator().manual_seed(seed)
    rewards_NF = torch.rand(num_groups * num_generations, 2, generator=generator)
    rewards_NF[0, 1] = nan
    return RewardSettings([1.0, 0.5]).group(
        rewards_NF,
        num_generations,
        lengths_PG=torch.randint(1, 50, (num_groups * num_generations,), generator=generator),
        prompt_ids_P=[prompt_id(f"{seed} {group}") for group in range(num_groups)],
        is_truncated_PG=rewards_NF[:, 0] > 0.5,
        completion_keys_PG=torch.arange(num_groups * num_generations),
    )


def add(log: RewardLog, batch: int, seed: int | None = None, mode: str = "train") -> RewardGroups:
    groups = make_groups(batch if seed is None else seed)
    log.add(groups, groups.rewards_PG * 2 - 1, groups.rewards_PG > 1.2, batch=batch, step=batch * 2, mode=mode)
    return groups


def numbers(run: Path, mode: str = "train") -> list[tuple[int, int]]:
    """Batch and attempt of every batch that a reader sees."""
    table = read_rows(run, mode)
    seen = list(zip(table["batch"].to_pylist(), table["attempt"].to_pylist(), strict=True))
    return sorted(set(seen))


def test_a_batch_comes_back_as_it_was(tmp_path):
    """Bit for bit: rewards per function, the weighted sum recomputed from them, advantages, and the rest."""
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    batches = [add(log, number) for number in range(3)]
    assert not has_log(tmp_path)
    log.flush()
    for number, (groups, logged) in enumerate(zip(batches, read_batches(tmp_path), strict=True)):
        assert (logged.batch, logged.step, logged.attempt) == (number, number * 2, 1)
        assert logged.groups.progress == number * 2 / 10
        for name in ("rewards_PG", "rewards_PGF", "lengths_PG", "is_truncated_PG", "completion_keys_PG"):
            ours, theirs = vars(logged.groups)[name], vars(groups)[name]
            assert torch.equal(ours.nan_to_num(nan=-9), theirs.nan_to_num(nan=-9))
        assert logged.groups.prompt_ids_P == groups.prompt_ids_P
        assert torch.equal(logged.advantages_PG, groups.rewards_PG * 2 - 1)
        excluded_PG = groups.rewards_PG > 1.2
        assert torch.equal(logged.excluded_PG, excluded_PG) if excluded_PG.any() else logged.excluded_PG is None
    assert read_rows(tmp_path)["reward"].to_numpy().dtype == np.float32


def test_a_later_attempt_replaces_what_it_generates_again(tmp_path):
    """The first run got to batch 5; the second went on from a checkpoint after batch 2 and got to batch 3."""
    for first, last in ((0, 5), (3, 3)):
        log = RewardLog(tmp_path)
        log.begin(first, RUN)
        for batch in range(first, last + 1):
            add(log, batch)
        log.flush()
    assert numbers(tmp_path) == [(0, 1), (1, 1), (2, 1), (3, 2)]
    log = RewardLog(tmp_path)
    log.begin(1, RUN)  # from an older checkpoint: the newest attempt counts
    add(log, 1)
    log.flush()
    assert numbers(tmp_path) == [(0, 1), (1, 3)]


def test_evaluations_are_kept_apart_and_before_the_checkpoint_of_their_step(tmp_path):
    """Two generation batches at each evaluation; a resumed run repeats the one at its start if it is told to."""
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    for batch in (0, 1, 2, 3):
        for part in range(2):
            add(log, batch, seed=100 * batch + part, mode="eval")
        add(log, batch)
    log.flush()
    log = RewardLog(tmp_path)
    log.begin(2, RUN)
    add(log, 2, seed=7, mode="eval")
    add(log, 2)
    log.flush()
    assert numbers(tmp_path) == [(0, 1), (1, 1), (2, 2)]
    table = read_rows(tmp_path, "eval").to_pandas()
    assert table.groupby("batch")["group"].unique().map(list).to_dict() == {
        0: [0, 1, 2, 3],
        1: [0, 1, 2, 3],
        2: [0, 1, 2, 3],
    }
    # The first of the two batches of the evaluation at 2 has a newer version.
    assert table[table.batch == 2].groupby("group")["attempt"].first().tolist() == [2, 2, 1, 1]


def test_an_evaluation_without_training_replaces_nothing(tmp_path):
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    add(log, 0)
    log.flush()
    log = RewardLog(tmp_path)
    log.begin(None, RUN)
    add(log, 0, mode="eval")
    log.flush()
    assert numbers(tmp_path) == [(0, 1)]
    assert numbers(tmp_path, "eval") == [(0, 2)]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_a_part_that_cannot_be_read_is_left_out_with_a_warning(tmp_path, monkeypatch, content):
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    add(log, 0)
    log.flush()
    (tmp_path / "rewards" / "part-0001-000001.parquet").write_bytes(content)
    (tmp_path / "rewards" / "part-0001-000002.tmp").write_bytes(content)
    said = []
    monkeypatch.setattr(reader.logger, "warning", said.append)
    assert numbers(tmp_path) == [(0, 1)]
    assert len(said) == 1
    assert "part-0001-000001.parquet` is left out" in said[0]


def test_reading_what_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="should hold a reward log, found none that can be read: train with"):
        read_rows(tmp_path)
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    add(log, 0)
    log.flush()
    (tmp_path / "rewards" / "run.json").unlink()
    assert len(read_rows(tmp_path)) == 6
    with pytest.raises(ValueError, match="should describe attempt 1 of the run, found none"):
        list(read_batches(tmp_path))
    (tmp_path / "rewards" / "run.json").write_text(json.dumps({"format_version": 9, "attempts": []}))
    with pytest.raises(ValueError, match="should have the format version 1, found 9"):
        list(read_batches(tmp_path))


def test_parts_are_written_now_and_then_and_cost_a_thousandth(tmp_path, monkeypatch):
    """Writing that takes 0.2 s pauses for 200 s; one that takes no time, for as long as was asked."""
    now = [0.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    replace = Path.replace

    def slow_replace(path, target):
        now[0] += 0.2
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow_replace)
    written = []
    for batch in range(60):
        now[0] += 10.0
        add(log, batch)
        written.append(len(list(log.folder.glob("part-*"))))
    # The first after 30 s, then 200 s after the end of the last.
    assert [written.index(number) for number in (1, 2, 3)] == [2, 22, 42]


def test_prompt_ids_are_those_of_the_canonical_json():
    def expected(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    assert prompt_id("What is 2+2?") == expected('"What is 2+2?"')
    assert prompt_id("é\n") == expected('"é\\n"')
    turns = [{"role": "user", "content": "hi"}]
    assert (
        prompt_id(turns)
        == prompt_id([{"content": "hi", "role": "user"}])
        == expected('[{"content":"hi","role":"user"}]')
    )
    pixels = [np.zeros((2, 2)), np.ones((2, 2))]
    ids = [prompt_id([{"role": "user", "content": [{"type": "image", "image": image}]}]) for image in pixels]
    assert ids[0] != ids[1]
    assert to_text("plain") == "plain"


@pytest.mark.parametrize("method", METHODS)
def test_an_estimator_comes_back_from_its_description(method):
    estimator = METHODS[method]()
    again = from_spec(json.loads(json.dumps(to_spec(estimator))))
    assert (type(again), again) == (type(estimator), estimator)


def test_a_description_of_something_else_is_one_sentence():
    with pytest.raises(ValueError, match=r"importable package\.module:Class, found 'nowhere:Class'"):
        from_spec({"class": "nowhere:Class", "arguments": {}})
    with pytest.raises(ValueError, match="should consist of this package's components, found 'pathlib:Path'"):
        from_spec({"class": "pathlib:Path", "arguments": {}})


WRITER = """
import os, sys
from pathlib import Path
from test_reward_log import RUN, add
from grpo_ext.reward_log import RewardLog

folder = Path(sys.argv[1])
for line in sys.stdin:  # one attempt per line; each is killed
    process = os.fork()
    if process == 0:
        log = RewardLog(folder, flush_seconds=0.0)
        log._next_flush = 0.0
        log.begin(int(line), RUN)
        batch = int(line)
        while True:
            add(log, batch)
            log.flush()
            (folder / "written").write_text(str(batch))
            os.replace(folder / "written", folder / "done")
            batch += 1
    print(process, flush=True)
    os.waitpid(process, 0)
"""


def test_twenty_kills_cost_what_waited_and_nothing_else(tmp_path):
    """A writer is killed at random moments, and begins again where its last checkpoint would lie."""
    moment = random.Random(time.time_ns())
    words = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment(), **pipes) as writer:
        kill_attempts(writer, tmp_path, moment)
    assert writer.returncode == 0
    for batch, logged in enumerate(read_batches(tmp_path)):
        assert torch.equal(logged.groups.rewards_PG, make_groups(batch).rewards_PG)
    assert len(read_attempts(tmp_path / "rewards")) == 20


def kill_attempts(writer: subprocess.Popen, folder: Path, moment: random.Random) -> None:
    """Twenty attempts; after each the log is read."""
    first = 0
    done = folder / "done"  # the newest batch whose part is written
    for attempt in range(1, 21):
        done.unlink(missing_ok=True)
        writer.stdin.write(f"{first}\n")
        writer.stdin.flush()
        process = int(writer.stdout.readline())
        while not done.exists():
            time.sleep(0.001)
        time.sleep(moment.uniform(0.0, 0.02))
        os.kill(process, signal.SIGKILL)
        while Path(f"/proc/{process}").exists():
            time.sleep(0.001)
        progress = int(done.read_text())
        assert all(pq.read_table(path).num_rows == 6 for path in folder.glob(f"rewards/part-{attempt:04d}-*.parquet"))
        seen = numbers(folder)
        assert [batch for batch, _ in seen] == list(range(len(seen)))
        assert len(seen) >= progress + 1
        assert max(number for _, number in seen) == attempt
        first = max(0, progress - moment.randrange(3))


# In training


def log_of(folder: Path, **settings: object) -> list[LoggedBatch]:
    return list(read_batches(folder, **settings))


def test_training_logs_what_was_generated_and_what_trained(tmp_path):
    """Every batch of training and of evaluation, with the pivots that MC-GRPO left out, and texts on request."""
    settings = {
        "num_extra_generations": 1,
        "per_device_train_batch_size": 10,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    args = make_args(tmp_path, log_rewards=True, log_reward_texts=True, per_device_eval_batch_size=8, **settings)
    trainer = make_trainer(args, advantage_estimator=MCGRPO(), eval_dataset=DATA.select(range(4)))
    trainer.train()
    batches = log_of(tmp_path)
    assert [batch.batch for batch in batches] == list(range(trainer.collapse_history.num_batches))
    assert all(batch.excluded_PG.sum() == len(batch.excluded_PG) for batch in batches)
    table = read_rows(tmp_path, None, texts=True).to_pandas()
    train = table[table["mode"] == "train"]
    assert train.length.mean() > 1
    assert set(train.prompt) <= set(DATA["prompt"])
    assert all(prompt_id(row.prompt) == row.prompt_id for row in train.itertuples())
    rewards = even_digits(completions=list(train.completion))
    assert train[f"reward/{even_digits.__name__}"].tolist() == pytest.approx(rewards)
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert train.groupby("batch").reward.mean().tolist() == pytest.approx(logged)
    assert set(table[table["mode"] == "eval"].prompt) == set(DATA["prompt"][:4])
    (attempt,) = read_attempts(tmp_path / "rewards")
    assert (attempt["num_generations"], attempt["num_extra_generations"], attempt["max_steps"]) == (4, 1, 3)
    assert from_spec(attempt["estimator"]) == MCGRPO()


def test_nothing_is_logged_unless_asked_for(tmp_path):
    make_trainer(make_args(tmp_path, max_steps=1)).train()
    assert not (tmp_path / "rewards").exists()
    with pytest.raises(ValueError, match="`log_reward_texts` should come with `log_rewards`"):
        make_args(tmp_path, log_reward_texts=True)


@pytest.mark.parametrize("save_steps", [2, 3], ids=["boundary", "within a cycle"])
def test_a_resumed_run_logs_each_batch_once(tmp_path, save_steps):
    """
    Two optimizer steps per generation batch: a checkpoint after three lies within the second batch, which trained
    one step, so that its second version is a batch of its own.
    """
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": save_steps, "num_iterations": 2}
    args = make_args(tmp_path, log_rewards=True, **settings)
    make_trainer(args, advantage_estimator=HADW()).train()
    whole = read_rows(tmp_path)
    resumed = make_trainer(args, advantage_estimator=HADW())
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{save_steps}"))
    found = read_rows(tmp_path)
    first = math.ceil(save_steps / 2)
    seen = numbers(tmp_path)
    assert seen[: first + 1] == [(batch, 1) for batch in range(first)] + [(first, 2)]
    assert [batch for batch, _ in seen] == list(range(resumed.collapse_history.num_batches))
    if save_steps == 2:
        same = [name for name in whole.column_names if name != "attempt"]
        assert found.select(same).equals(whole.select(same))


def last_or_none(completions: list[str], **kwargs: object) -> list[float | None]:
    """By the last character; a third of the rows is unscorable."""
    return [None if ord(text[-1]) % 3 == 0 else ord(text[-1]) % 5 / 4 for text in completions]


def test_a_stock_trainer_shows_the_same_and_trains_the_same(tmp_path):
    """TRL's own trainer, watched and not: equal weights; the log holds TRL's advantages."""

    def make(folder: Path) -> GRPOTrainer:
        names = (
            "per_device_train_batch_size",
            "num_generations",
            "max_completion_length",
            "max_steps",
            "learning_rate",
        )
        names += ("logging_steps", "save_strategy", "report_to", "disable_tqdm", "use_cpu", "bf16")
        names += ("gradient_accumulation_steps",)
        ours = vars(make_args(folder))
        args = GRPOConfig(
            str(folder), gradient_checkpointing=False, temperature=3.0, **{name: ours[name] for name in names}
        )
        return make_trainer(args, last_or_none, trainer_class=GRPOTrainer)

    plain, watched = make(tmp_path / "plain"), make(tmp_path / "watched")
    watch_rewards(watched, log_rewards=True)
    assert (type(watched).__name__, isinstance(watched, GRPOTrainer)) == ("GRPOTrainer", True)
    before = [parameter.clone() for parameter in plain.model.parameters()]
    for trainer in (plain, watched):
        set_seed(3)
        trainer.train()
    assert not all(map(torch.equal, before, plain.model.parameters()))
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    entries = [[entry for entry in t.state.log_history if "reward" in entry] for t in (watched, plain)]
    for ours, theirs in zip(*entries, strict=True):
        assert {name: ours[name] for name in theirs if name != "step_time"} == {
            name: value for name, value in theirs.items() if name != "step_time"
        }
        assert "acr/rate" in ours
    batches = log_of(tmp_path / "watched")
    estimator = from_spec(read_attempts(tmp_path / "watched" / "rewards")[0]["estimator"])
    assert len(batches) == 3
    for batch in batches:
        expected_PG = estimator.estimate(batch.groups)
        assert expected_PG.isnan().any()
        assert torch.equal(batch.advantages_PG.nan_to_num(nan=-9), expected_PG.nan_to_num(nan=-9))


def test_a_stock_run_knows_where_it_resumes(tmp_path):
    """By the same trainer, with an evaluation at its start; without figures of a beginning that it has not seen."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_on_start": True}
    settings |= {"eval_strategy": "steps", "eval_steps": 100, "per_device_eval_batch_size": 4}
    args = make_args(tmp_path, **settings)
    trainer = make_trainer(args, last_or_none, trainer_class=GRPOTrainer, eval_dataset=DATA.select(range(2)))
    watch_rewards(trainer, log_rewards=True)
    trainer.train()
    assert all("acr/first_100" in entry for entry in trainer.state.log_history if "loss" in entry)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert numbers(tmp_path) == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert numbers(tmp_path, "eval") == [(0, 1), (2, 2), (4, 2)]  # at the start of each, and at the end
    assert trainer.collapse_history.num_earlier == trainer.collapse_history.num_batches == 2
    assert [("acr/first_100" in entry) for entry in trainer.state.log_history if "loss" in entry][2:] == [False, False]


def test_what_cannot_be_watched_is_refused_and_left_as_it_was(tmp_path):
    """A mistake can be mended: the same trainer is watched at the second call."""
    trainer = make_trainer(make_args(tmp_path, max_steps=1), trainer_class=GRPOTrainer)
    own = type(trainer)
    for settings, message in (
        ({"success_reward": "nobody"}, "`success_reward` should name one of the reward functions"),
        ({"reward_min": 1.0}, r"`reward_min` should lie below reward_max=1\.0"),
        ({"log_reward_texts": True}, "`log_reward_texts` should come with `log_rewards`"),
    ):
        with pytest.raises(ValueError, match=message):
            watch_rewards(trainer, **settings)
        assert type(trainer) is own
    with pytest.raises(ValueError, match="should get a `GRPOTrainer` that nobody watches yet, found `PosixPath`"):
        watch_rewards(tmp_path)
    watch_rewards(trainer)
    trainer.train()
    with pytest.raises(ValueError, match="which is watched: drop the call"):
        watch_rewards(trainer)


class Cached(GRPOTrainer):
    """Takes every second batch from the one before."""

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict:
        if self.state.global_step % 2:
            return self.kept
        self.kept = super()._generate_and_score_completions(inputs)
        return self.kept


def test_a_batch_that_was_not_generated_is_not_counted(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("grpo_ext.watching.logger.warning_once", said.append)
    trainer = make_trainer(make_args(tmp_path, max_steps=4), trainer_class=Cached)
    watch_rewards(trainer)
    trainer.train()
    assert trainer.collapse_history.num_batches == 2
    assert "not generated and rewarded as in TRL" in said[0]


@dataclass
class Squashed(AdvantageEstimator):
    """An argument that JSON cannot hold."""

    squash: Callable = torch.tanh

    def estimate(self, groups: RewardGroups) -> torch.Tensor:
        return self.squash(groups.rewards_PG - groups.rewards_PG.nanmean(dim=1, keepdim=True))


def test_an_argument_that_json_cannot_hold_ends_no_training(tmp_path):
    """And the replay says that it cannot make the estimator again."""
    make_trainer(make_args(tmp_path, log_rewards=True, max_steps=1), advantage_estimator=Squashed()).train()
    check = replay_run(tmp_path, {}).check
    assert "should be plain values, found <built-in method tanh" in check.describe()


@pytest.mark.parametrize("content", ["xx", "[]", "{}", '{"format_version": 1, "attempts": [{"attempt": 1}]}'])
def test_a_damaged_description_is_one_sentence_and_ends_no_training(tmp_path, monkeypatch, content):
    log = RewardLog(tmp_path)
    log.begin(0, RUN)
    add(log, 0)
    log.flush()
    path = tmp_path / "rewards" / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"should describe .*, found .*: put the file back"):
        list(read_batches(tmp_path))
    said = []
    monkeypatch.setattr(writer.logger, "warning", said.append)
    log = RewardLog(tmp_path)
    log.begin(1, RUN)
    assert "It is `run.json.damaged` now" in said[0]
    assert [entry["attempt"] for entry in read_attempts(tmp_path / "rewards")] == [2]


@pytest.mark.slow
def test_a_million_completions_go_through_five_methods_in_a_minute(tmp_path):
    """Batches of 512, in a process of its own, below 2 GB."""
    log, settings = RewardLog(tmp_path, flush_seconds=1e9), RewardSettings([1.0])
    run = RUN | vars(settings) | {"reward_names": ["right"], "identity": "HADW", "device": "cpu"}
    log.begin(0, run | {"num_extra_generations": 0, "estimator": to_spec(HADW()), "state": HADW().state_dict()})
    generator = torch.Generator().manual_seed(0)
    for batch in range(1954):
        chance_P1 = torch.rand(64, 1, generator=generator)
        groups = settings.group(
            (torch.rand(64, 8, generator=generator) < chance_P1).float().view(-1, 1),
            8,
            lengths_PG=torch.randint(1, 1000, (512,), generator=generator),
            prompt_ids_P=[f"{place:016x}" for place in range(64)],
            is_truncated_PG=torch.zeros(512, dtype=torch.bool),
            completion_keys_PG=torch.arange(512),
        )
        log.add(groups, groups.rewards_PG, None, batch=batch, step=batch, mode="train")
        if batch % 20 == 19:
            log.flush()
    log.flush()
    code = (
        "import resource, sys\n"
        "from grpo_ext.cli.replay import main\n"
        f"main([{str(tmp_path)!r}, '--method', 'grpo', 'avspo', 'ha_dw', 'a_grae', 'mc_grpo'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert time.monotonic() - start < 60
    assert int(done.stdout.split()[-1]) < 2_000_000  # KiB
    assert json.loads((tmp_path / "replay.json").read_text())["methods"][0]["num_rows"] == 1954 * 512


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, AdvantageGRPOTrainer])
def test_a_run_that_is_resumed_within_cycles_loses_and_doubles_nothing(tmp_path, trainer_class):
    """Two steps per batch; stopped after steps 3 and 6. Batches begin at steps 0, 2; 3, 5; 6, and all have trained."""
    settings = {"save_strategy": "steps", "save_steps": 3, "num_iterations": 2, "log_rewards": True}
    for number in range(3):
        args = make_args(tmp_path, **settings, max_steps=(3, 6, 7)[number])
        trainer = make_trainer(args, last_or_none, trainer_class=trainer_class)
        if trainer_class is GRPOTrainer:
            watch_rewards(trainer, log_rewards=True)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{3 * number}") if number else None)
    table = read_rows(tmp_path)
    found = dict.fromkeys(zip(*(table[name].to_pylist() for name in ("batch", "step", "attempt")), strict=True))
    assert list(found) == [(0, 0, 1), (1, 2, 1), (2, 3, 2), (3, 5, 2), (4, 6, 3)]


def test_weights_that_change_begin_an_attempt(tmp_path):
    """The reader adds each batch's rewards as the training did, and the replay agrees."""

    class Shift(AdvantageCallback):
        def on_advantages(self, args, state, control, **kwargs):
            trainer.reward_weights = torch.tensor([0.0, 1.0])

    functions = [even_digits, last_or_none]
    args = make_args(tmp_path, log_rewards=True, reward_weights=[1.0, 0.0], temperature=3.0)
    trainer = make_trainer(args, functions, callbacks=[Shift()], advantage_estimator=HADW())
    trainer.train()
    assert numbers(tmp_path) == [(0, 1), (1, 2), (2, 2)]
    logged = read_rows(tmp_path)["reward"].to_numpy()
    read = torch.cat([batch.groups.rewards_PG.flatten() for batch in read_batches(tmp_path)])
    assert torch.equal(torch.from_numpy(logged.copy()).nan_to_num(nan=-9), read.nan_to_num(nan=-9))
    assert replay_run(tmp_path, {}).check.num_equal == 3
