"""Resume equals never stopping; a checkpoint is complete or it is not one."""

import contextlib
import json
import logging
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from _training import DATA, Recorder, equal_weights, even_digits, make_args, make_trainer, weights
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from grpo_ext import checkpoint
from grpo_ext.advantages import AGRAE, AVSPO, GRPO, HADW, MCGRPO
from grpo_ext.advantages.ha_dw import AdaptiveForgetting
from grpo_ext.diagnostics import CollapseHistory
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.preemption import SigtermCallback

STATEFUL = [
    GRPO(),
    HADW(),
    HADW(anchor=AdaptiveForgetting(stability_window=3)),
    AGRAE(omega_ema=0.5),
    AVSPO(acr_threshold_init=0.3),
    HADW(base=AVSPO(acr_threshold_init=0.3)),
    MCGRPO(),
]


@pytest.fixture
def warnings_seen(caplog):
    """What our loggers say; transformers' loggers do not propagate by default."""
    transformers_logging.enable_propagation()
    caplog.set_level(logging.WARNING)
    yield caplog
    transformers_logging.disable_propagation()


def settings_for(estimator):
    extra = estimator.num_extra_generations
    return {"num_extra_generations": extra, "per_device_train_batch_size": 2 * (4 + extra), "logging_steps": 1}


@pytest.mark.parametrize("estimator", STATEFUL, ids=lambda estimator: estimator.identity())
def test_resume_equals_never_stopping(tmp_path, estimator):
    """Saved at step 2 of 4, resumed: the same advantages, state and weights, bit for bit."""
    settings = settings_for(estimator) | {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(
        make_args(tmp_path / "whole", **settings), even_digits, Recorder, advantage_estimator=estimator
    )
    whole.train()

    args = make_args(tmp_path / "resumed", **settings)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = make_trainer(args, even_digits, Recorder, advantage_estimator=estimator)
    resumed.train(resume_from_checkpoint=True)

    assert len(whole.recorded) == 4
    assert len(resumed.recorded) == 2
    assert all(torch.equal(a, b) for a, b in zip(whole.recorded[2:], resumed.recorded, strict=True))
    assert whole.advantage_estimator.state_dict() == resumed.advantage_estimator.state_dict()
    assert whole.collapse_history.state_dict() == resumed.collapse_history.state_dict()
    assert equal_weights(weights(whole), weights(resumed))


def test_without_the_state_file_a_resumed_run_differs(tmp_path, warnings_seen):
    """The comparison above can fail: HA-DW's window is what the file holds."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(make_args(tmp_path, **settings), advantage_estimator=HADW())
    whole.train()
    (tmp_path / "checkpoint-2" / checkpoint.STATE_FILE).unlink()
    (tmp_path / "checkpoint-2" / checkpoint.MARKER_FILE).unlink()
    resumed = make_trainer(make_args(tmp_path, **settings), advantage_estimator=HADW())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "starts afresh" in warnings_seen.text
    assert resumed.advantage_estimator.state_dict() != whole.advantage_estimator.state_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with checkpoints at steps 1 and 2."""
    folder = tmp_path_factory.mktemp("finished")
    args = make_args(folder, max_steps=2, save_strategy="steps", save_steps=1)
    make_trainer(args, advantage_estimator=HADW()).train()
    return folder


@pytest.fixture
def saved(finished, tmp_path):
    """A copy of that run."""
    return shutil.copytree(finished, tmp_path / "saved")


def resume(folder, where, estimator=None):
    args = make_args(folder, max_steps=3)
    trainer = make_trainer(args, advantage_estimator=estimator or HADW())
    trainer.train(resume_from_checkpoint=where)
    return trainer


def test_another_methods_state_is_refused(saved):
    with pytest.raises(ValueError, match=r"state of `GRPO`, found that of `HADW\(base=GRPO, anchor=MovingAverage\)`"):
        resume(saved, str(saved / "checkpoint-2"), GRPO())


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "blank": lambda content: b" \n",
    "truncated": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "written twice": lambda content: content * 2,
    "zeros": lambda content: bytes(len(content)),
    "no text": lambda content: bytes(range(256)),
    "a digit changed": lambda content: content.replace(b"1.3", b"1.4"),
    "a list": lambda content: b"[1, 2]",
    "null": lambda content: b"null",
    "nested too deep": lambda content: b"[" * 100_000,
    "another program's": lambda content: b'{"epoch": 1.0, "global_step": 2}',
    "without a checksum": lambda content: re.sub(rb',\s*"sha256": "\w+"', b"", content),
    "a foreign checksum": lambda content: re.sub(rb'"sha256": "\w+"', b'"sha256": 7', content),
}


def assert_refused(folder):
    """In one sentence, and with the estimator as it was."""
    estimator, history = HADW(), CollapseHistory()
    with pytest.raises(ValueError, match=r"advantage_state.json` should (hold|have)") as caught:
        checkpoint.load_state(folder, estimator, history)
    assert re.search(r", found .*: (resume|start) ", str(caught.value), flags=re.DOTALL)
    assert (estimator, history) == (HADW(), CollapseHistory())


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_state_file_is_named(saved, damage):
    folder = saved / "checkpoint-2"
    path = folder / checkpoint.STATE_FILE
    content = path.read_bytes()
    checkpoint.load_state(folder, HADW(), CollapseHistory())
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    assert_refused(folder)


def test_any_changed_byte_of_the_state_file_is_named(saved):
    """White space aside, in which the same object is written."""
    folder = saved / "checkpoint-2"
    path, generator = folder / checkpoint.STATE_FILE, random.Random(0)
    content = path.read_bytes()
    for _ in range(300):
        position, value = generator.randrange(len(content)), generator.randrange(256)
        damaged = content[:position] + bytes([value]) + content[position + 1 :]
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            if json.loads(damaged) == json.loads(content):
                continue
        assert_refused(folder)


def test_a_folder_in_the_place_of_the_state_file_is_named(saved):
    folder = saved / "checkpoint-2"
    (folder / checkpoint.STATE_FILE).unlink()
    (folder / checkpoint.STATE_FILE).mkdir()
    assert_refused(folder)


def test_a_damaged_state_file_stops_a_resume_that_names_its_checkpoint(saved):
    path = saved / "checkpoint-2" / checkpoint.STATE_FILE
    path.write_bytes(path.read_bytes().replace(b"1.3", b"1.4"))
    with pytest.raises(ValueError, match="its content and its checksum differ"):
        resume(saved, str(saved / "checkpoint-2"))


def test_another_method_on_purpose(saved, warnings_seen):
    """`reset_advantage_state` starts the new method, and the collapse figures, afresh at the old weights and step."""
    args = make_args(saved, max_steps=3, reset_advantage_state=True)
    trainer = make_trainer(args, advantage_estimator=AVSPO(acr_threshold_init=0.3))
    trainer.train(resume_from_checkpoint=True)
    assert "StratifiedRewards)` starts afresh, as `reset_advantage_state` asks" in warnings_seen.text
    assert trainer.state.global_step == 3
    assert trainer.collapse_history.num_batches == trainer.advantage_estimator.num_batches == 1


def test_a_reset_gets_past_a_damaged_state_file(saved):
    path = saved / "checkpoint-2" / checkpoint.STATE_FILE
    path.write_text("half")
    for where in (True, str(path.parent)):
        args = make_args(saved, max_steps=3, reset_advantage_state=True)
        trainer = make_trainer(args, advantage_estimator=HADW())
        trainer.train(resume_from_checkpoint=where)
        assert len(trainer.advantage_estimator.anchor.accuracies) == 1


def test_a_reset_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="`reset_advantage_state` should come with `resume_from_checkpoint`"):
        make_trainer(make_args(tmp_path, reset_advantage_state=True)).train()


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("state", "anchor", "accuracies"), "0.5"),
        (("state", "anchor", "accuracies"), None),
        (("state", "anchor", "accuracies"), ["a"]),
        (("state", "anchor", "accuracies"), [True]),
        (("collapse_history", "num_batches"), None),
        (("state", "anchor", "accuracies"), [float("nan")]),
        (("state", "anchor", "beliefs"), []),
        (("collapse_history", "num_idle"), []),
        (("collapse_history",), []),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_named_and_nothing_is_loaded(saved, keys, value):
    path = saved / "checkpoint-2" / checkpoint.STATE_FILE
    content = json.loads(path.read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": checkpoint.checksum(content)}))
    estimator, history = HADW(), CollapseHistory()
    with pytest.raises(ValueError, match=r"advantage_state.json` cannot be used. .* saved\."):
        checkpoint.load_state(saved / "checkpoint-2", estimator, history)
    assert estimator == HADW()
    assert history == CollapseHistory()


@pytest.mark.parametrize("marker", ['{"files": []}', '{"files": {}}', "[]", "", '{"files": null}'])
def test_a_damaged_marker_is_an_incomplete_checkpoint(saved, marker):
    (saved / "checkpoint-2" / checkpoint.MARKER_FILE).write_text(marker)
    assert checkpoint.find_damage(saved / "checkpoint-2") == "its checkpoint_complete.json is damaged"
    assert checkpoint.newest_complete(saved)[0] == saved / "checkpoint-1"


def test_an_older_checkpoint_goes_only_once_the_new_one_is_complete(tmp_path, monkeypatch):
    args = make_args(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    make_trainer(args).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert args.save_total_limit == 1

    marked = []

    def interrupt(folder):
        marked.append(folder)
        if len(marked) == 2:
            raise KeyboardInterrupt
        mark(folder)

    mark = checkpoint.mark_complete
    monkeypatch.setattr("grpo_ext.trainer.mark_complete", interrupt)
    args = make_args(tmp_path / "cut", max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(args).train()
    assert checkpoint.newest_complete(tmp_path / "cut")[0].name == "checkpoint-1"


@pytest.mark.parametrize("estimator", [AGRAE(omega_ema=0.5), AVSPO()], ids=AdvantageEstimator.identity)
def test_an_optional_number_is_a_number_or_nothing(estimator):
    name = "omega" if isinstance(estimator, AGRAE) else "prev_mean_reward"
    for value in (None, 0.5):
        estimator.load_state_dict(estimator.state_dict() | {name: value})
    with pytest.raises(ValueError, match=f"The state `{name}`"):
        estimator.load_state_dict(estimator.state_dict() | {name: "0.5"})


def test_arguments_that_json_cannot_hold_do_not_stop_a_checkpoint(tmp_path):
    @dataclass
    class Odd(AdvantageEstimator):
        places: tuple[int, ...] = (1, 2)
        function: object = len

        def estimate(self, groups):
            return groups.restrict(groups.rewards_PG)

    checkpoint.save_state(tmp_path, checkpoint.collect_state(Odd(), CollapseHistory(), True))
    content = checkpoint.read_state(tmp_path, "Odd")
    assert content["arguments"] == checkpoint.plain_arguments(Odd())


@pytest.mark.parametrize(
    "kept",
    [{2: 0.5}, {"a": (1, 2)}, {"a": float("nan")}, {"a": torch.tensor(1.0)}, {"a": [(1, 2)] * 999}],
    ids=range(5),
)
def test_a_state_that_a_checkpoint_cannot_hold_is_an_error_at_the_first_one(kept):
    @dataclass
    class Odd(GRPO):
        kept: dict = field(init=False, default_factory=lambda: kept)

    with pytest.raises(ValueError, match=r"The state `kept` of `Odd` should be finite numbers, .*, found \{") as caught:
        checkpoint.collect_state(Odd(), CollapseHistory(), True)
    assert len(str(caught.value)) < 300


def test_a_state_of_another_kind_than_declared_is_an_error_at_the_first_checkpoint():
    estimator = HADW()
    estimator.anchor.accuracies = [True]
    with pytest.raises(ValueError, match=r"The state `accuracies` .* declare it as what it holds"):
        checkpoint.collect_state(estimator, CollapseHistory(), True)


def test_what_a_kill_left_of_an_earlier_marker_is_no_part_of_the_checkpoint(saved):
    folder = saved / "checkpoint-2"
    for name in (checkpoint.MARKER_FILE, checkpoint.STATE_FILE):
        (folder / name).with_suffix(".tmp").write_text("half")
    (folder / checkpoint.MARKER_FILE).unlink()
    checkpoint.save_state(folder, checkpoint.collect_state(HADW(), CollapseHistory(), True))
    checkpoint.mark_complete(folder)
    assert checkpoint.find_damage(folder) is None


@pytest.mark.parametrize(("result", "error"), [("found", None), (None, "nothing there")])
def test_other_ranks_take_what_the_main_process_found(monkeypatch, result, error):
    """Their own file system is not asked."""

    def receive(outcome):
        outcome[:] = [result, error]

    monkeypatch.setattr(checkpoint, "PartialState", lambda: SimpleNamespace(is_main_process=False))
    monkeypatch.setattr(checkpoint, "broadcast_object_list", receive)
    if error is None:
        assert checkpoint.on_main_process(pytest.fail) == "found"
    else:
        with pytest.raises(ValueError, match="nothing there"):
            checkpoint.on_main_process(pytest.fail)


def test_the_main_process_raises_its_own_error_after_the_others_know(monkeypatch):
    told = []

    def read():
        raise PermissionError("no access")

    monkeypatch.setattr(checkpoint, "broadcast_object_list", told.append)
    with pytest.raises(PermissionError):
        checkpoint.on_main_process(read)
    assert told == [[None, "no access"]]


def test_a_named_checkpoint_without_its_marker_is_incomplete(saved):
    """A kill leaves the state file, which comes first, and no marker; a checkpoint of TRL has neither."""
    folder = saved / "checkpoint-2"
    (folder / checkpoint.MARKER_FILE).unlink()
    with pytest.raises(
        ValueError, match=r"should be a complete checkpoint, found that it lacks checkpoint_complete.json"
    ):
        checkpoint.choose_checkpoint(str(folder), str(saved))
    (folder / checkpoint.STATE_FILE).unlink()
    assert checkpoint.choose_checkpoint(str(folder), str(saved)) == str(folder)


def test_the_saved_arguments_are_the_users(tmp_path):
    args = make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, save_total_limit=3)
    make_trainer(args).train()
    assert torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False).save_total_limit == 3


def test_sigterm_saves_once_and_leaves_the_evaluation_out(tmp_path, monkeypatch, warnings_seen):
    """Also where transformers would save and evaluate at the end of the epoch; another training starts unasked."""
    settings = {"save_strategy": "epoch", "eval_strategy": "epoch", "per_device_eval_batch_size": 8}
    args = make_args(tmp_path, max_steps=-1, num_train_epochs=1, enable_jit_checkpoint=True, **settings)
    trainer = make_trainer(args, eval_dataset=DATA.select(range(8)), train_dataset=DATA.select(range(16)))
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, SigtermCallback)]
    done = []
    monkeypatch.setattr(trainer, "evaluate", lambda *args, **kwargs: done.append("evaluated") or {"eval_loss": 0.0})
    save = trainer._save_checkpoint
    monkeypatch.setattr(trainer, "_save_checkpoint", lambda *args: done.append("saved") or save(*args))

    class Ask(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            callback.jit_manager.is_checkpoint_requested = state.global_step == 1 and not done

    trainer.add_callback(Ask())
    trainer.train()
    assert (trainer.state.global_step, done) == (2, ["saved"])
    assert checkpoint.find_damage(tmp_path / "checkpoint-2") is None
    trainer.train()
    assert trainer.state.global_step == 4
    assert done == ["saved", "evaluated", "saved"]


def test_sigterm_says_which_evaluation_it_leaves_out(tmp_path, monkeypatch, warnings_seen):
    args = make_args(tmp_path, enable_jit_checkpoint=True, eval_strategy="steps", eval_steps=1)
    trainer = make_trainer(args, eval_dataset=DATA.select(range(8)))
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, SigtermCallback)]
    callback.jit_manager.is_checkpoint_requested = True
    trainer.train()
    assert trainer.state.global_step == 1
    assert "the evaluation of step 1 is left out" in warnings_seen.text


def test_a_changed_file_contradicts_the_marker(saved):
    path = saved / "checkpoint-2" / checkpoint.STATE_FILE
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ValueError, match=r"complete checkpoint, found that advantage_state.json has"):
        resume(saved, str(saved / "checkpoint-2"))


def test_resume_takes_the_newest_complete_checkpoint_and_names_the_skipped(saved, warnings_seen):
    (saved / "checkpoint-2" / "optimizer.pt").write_bytes(b"half")
    trainer = resume(saved, True)
    assert "Skipping the incomplete checkpoint" in warnings_seen.text
    assert "optimizer.pt has 4 bytes" in warnings_seen.text
    assert len(trainer.advantage_estimator.anchor.accuracies) == 3


def test_no_complete_checkpoint_is_an_error(saved):
    for folder in saved.glob("checkpoint-*"):
        (folder / checkpoint.MARKER_FILE).unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2: it lacks checkpoint_complete.json"):
        resume(saved, True)
    with pytest.raises(ValueError, match="does not exist"):
        resume(saved, str(saved / "checkpoint-7"))


def test_the_marker_lists_every_file(saved):
    folder = saved / "checkpoint-2"
    marker = json.loads((folder / checkpoint.MARKER_FILE).read_text())
    files = {path.name for path in folder.iterdir()} - {checkpoint.MARKER_FILE}
    assert set(marker["files"]) == files
    assert checkpoint.STATE_FILE in files


def test_changed_arguments_are_allowed_and_said(saved, warnings_seen):
    trainer = resume(saved, True, HADW(reweight_scale=1.5))
    assert len(trainer.advantage_estimator.anchor.accuracies) == 3
    assert "'reweight_scale': 1.3" in warnings_seen.text


def test_a_checkpoint_within_a_generation_cycle_is_said(tmp_path, warnings_seen):
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    make_trainer(make_args(tmp_path, **settings)).train()
    assert json.loads((tmp_path / "checkpoint-2" / checkpoint.STATE_FILE).read_text())["is_generation_boundary"]
    resumed = make_trainer(make_args(tmp_path, **settings), advantage_estimator=GRPO())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "within a generation cycle" in warnings_seen.text
