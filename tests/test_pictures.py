"""A picture's artists hold the logged numbers; what a run lacks is left out; black and white suffices."""

import doctest
import json
import subprocess
import sys
from io import BytesIO
from itertools import combinations
from types import ModuleType, SimpleNamespace

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from transformers import TrainerControl, TrainerState

from grpo_ext import diagnostics, pictures, run_history
from grpo_ext.cli.plot import main
from grpo_ext.cli.report import save_picture
from grpo_ext.diagnostics import SUCCESS_BINS, CollapseHistory, collapse_metrics, success_histogram
from grpo_ext.groups import RewardGroups
from grpo_ext.notebook import LivePictureCallback
from grpo_ext.pictures import draw_run
from grpo_ext.reward_log import LoggedBatch
from grpo_ext.run_history import MAX_WINDOWS, BatchTally, RunHistory, Series, from_logs

STEPS = [1, 2, 3, 4]
REWARD = [0.25, 0.5, 0.5, 0.75]
CORRECT, INCORRECT, OTHER = [0.0, 0.125, 0.25, 0.5], [0.5, 0.25, 0.25, 0.0], [0.125, 0.0, 0.0, 0.125]
AFTER, LEVEL, BATCH = [0.5, 0.25, 0.25, 0.5], [0.5, 0.4, 0.3, 0.2], [0.6, 0.4, 0.5, 0.6]

PARTS = {
    "reward": {"reward": REWARD},
    "evaluation": {"eval_reward": [0.1, 0.2, 0.3, 0.4]},
    "collapse": {"acr/all_correct": CORRECT, "acr/all_incorrect": INCORRECT, "acr/other": OTHER, "acr/after": AFTER},
    "stock": {"frac_reward_zero_std": BATCH},
    "threshold": {"avspo/threshold": LEVEL, "acr/rate": BATCH},
    "anchor": {"ha_dw/anchor": LEVEL, "ha_dw/batch_accuracy": BATCH},
}


def make_logs(*parts):
    columns = {name: values for part in parts for name, values in PARTS[part].items()}
    return [{"step": step, **{name: values[i] for name, values in columns.items()}} for i, step in enumerate(STEPS)]


def make_groups(rewards):
    return RewardGroups(torch.tensor(rewards))


# A batch with one group right and one mixed, all of whose advantages are zero.
MIXED = make_groups([[1.0, 1.0], [1.0, 0.0]])


def make_tally(num_steps=3):
    tally = BatchTally()
    for step in range(1, num_steps + 1):
        tally.add(step, MIXED, torch.zeros(2, 2))
    return tally


def labels(figure):
    return [axes.get_ylabel() for axes in figure.axes]


def line(axes, label):
    (found,) = [drawn for drawn in axes.lines if drawn.get_label() == label]
    return found.get_xdata().tolist(), found.get_ydata().tolist()


def render(figure):
    """Draws for real: an overlap that the layout cannot solve is a warning, and a warning is an error."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=40)
    return file.getvalue()


def test_the_lines_are_the_logged_numbers():
    figure = draw_run(from_logs(make_logs("reward", "evaluation", "collapse", "threshold", "anchor")))
    reward, collapse, threshold, anchor = figure.axes
    assert line(reward, "training") == (STEPS, REWARD)
    assert line(reward, "evaluation") == (STEPS, PARTS["evaluation"]["eval_reward"])
    assert line(collapse, "without a signal\nafter the method") == (STEPS, AFTER)
    assert line(threshold, "threshold") == line(anchor, "anchor") == (STEPS, LEVEL)
    assert line(threshold, "collapsed groups") == line(anchor, "batch accuracy") == (STEPS, BATCH)


def test_the_areas_are_the_causes_one_on_the_other():
    _, collapse = draw_run(from_logs(make_logs("reward", "collapse"))).axes
    low = [0.0] * 4
    for area, share in zip(collapse.collections, (CORRECT, INCORRECT, OTHER), strict=True):
        high = [a + b for a, b in zip(low, share, strict=True)]
        corners = {tuple(corner) for corner in area.get_paths()[0].vertices.tolist()}
        assert corners == {*zip(STEPS, low, strict=True), *zip(STEPS, high, strict=True)}
        low = high


def test_the_map_is_the_share_of_groups():
    history = RunHistory(histogram=make_tally().histogram())
    axes = draw_run(history).axes[0]
    (mesh,) = axes.collections
    # Of two groups one is all right and one half right, in each of the three windows.
    assert mesh.get_array().tolist() == [[0.0] * 3, [0.0] * 3, [0.5] * 3, [0.0] * 3, [0.0] * 3, [0.5] * 3]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == list(SUCCESS_BINS)


PANELS = {
    "reward": "mean reward",
    "evaluation": "mean reward",
    "collapse": "share of groups\nwith equal rewards",
    "stock": "share of groups\nwith equal rewards",
    "threshold": "AVSPO: threshold",
    "anchor": "HA-DW: anchor",
    "histogram": "groups by success rate",
}


@pytest.mark.parametrize("parts", [parts for size in range(1, 8) for parts in combinations(PANELS, size)], ids=" ".join)
def test_every_combination_shows_what_the_run_has(parts):
    history = from_logs(make_logs(*(part for part in parts if part != "histogram")))
    if "histogram" in parts:
        history.histogram = make_tally().histogram()
    assert labels(draw_run(history)) == list(dict.fromkeys(PANELS[part] for part in parts))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_run_of_any_length_can_be_laid_out(num_steps):
    history = from_logs(make_logs("reward", "evaluation", "collapse", "threshold")[:num_steps], title="a run")
    history.histogram = make_tally(num_steps).histogram()
    assert history.is_empty == (num_steps == 0)
    figure = draw_run(history)
    assert render(figure).startswith(b"\x89PNG")
    assert len(figure.axes) == (0 if num_steps == 0 else 4)


def test_stock_trl_has_its_own_figure():
    figure = draw_run(from_logs(make_logs("reward", "stock")))
    assert line(figure.axes[1], "frac_reward_zero_std\n(TRL's figure)") == (STEPS, BATCH)
    render(figure)


def test_rewards_beyond_one_are_not_cut_off():
    axes = draw_run(RunHistory(reward=Series([1, 2], [-3.0, 2.0]))).axes[0]
    assert axes.get_ylim()[0] < -3 < 2 < axes.get_ylim()[1]


def test_a_long_run_is_drawn_by_means_and_says_so():
    num_steps = 3 * MAX_WINDOWS
    values = [step % 3 / 2 for step in range(num_steps)]  # every three of them have the mean 0.5
    figure = draw_run(RunHistory(reward=Series(list(range(num_steps)), values)))
    steps, means = line(figure.axes[0], "training")
    assert means == [0.5] * MAX_WINDOWS
    assert steps == list(range(1, num_steps, 3))
    assert figure.axes[0].get_xlabel() == "optimizer step (lines: means of 3 logged values)"
    assert make_tally(num_steps).histogram().edges == [step + 0.5 for step in range(0, num_steps + 1, 3)]


def test_numbers_that_json_lacks_are_passed_over():
    logs = [{"step": 1, "reward": None}, {"step": 2, "reward": float("nan")}, {"step": 3, "reward": 0.5}, {"reward": 1}]
    assert from_logs(logs).reward == Series([3], [0.5])


def test_a_figure_is_used_again():
    figure = draw_run(from_logs(make_logs("reward", "collapse", "threshold")))
    assert draw_run(from_logs(make_logs("reward")), figure) is figure
    assert labels(figure) == ["mean reward"]
    render(figure)


def test_black_and_white_suffices():
    """No two causes share a hatch, neighbours differ in luminance, and no two lines of a panel share a style."""
    figure = draw_run(from_logs(make_logs("reward", "evaluation", "collapse", "threshold", "anchor")))
    areas = figure.axes[1].collections
    hatches = [area.get_hatch() for area in areas]
    assert None not in hatches
    assert len(set(hatches)) == 3
    light = [
        sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(area.get_facecolor()[0]), strict=True))
        for area in areas
    ]
    assert min(abs(a - b) for a, b in combinations(light, 2)) > 0.1
    for axes in figure.axes:
        styles = [drawn.get_linestyle() for drawn in axes.lines]
        assert len(set(styles)) == len(styles)


def test_names_beside_a_panel_do_not_overlap():
    figure = draw_run(RunHistory(reward=Series([1, 2], [0.1, 0.5]), evaluation=Series([1, 2], [0.3, 0.5])))
    figure.draw_without_rendering()
    first, second = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the leader
    assert not first.overlaps(second)


def test_pyplot_is_left_alone(tmp_path):
    code = (
        "import sys\n"
        "from grpo_ext.pictures import draw_run\n"
        "from grpo_ext.run_history import from_logs\n"
        "assert 'matplotlib' not in sys.modules\n"
        "draw_run(from_logs([{'step': 1, 'reward': 0.5}])).savefig(sys.argv[1])\n"
        "assert not {'matplotlib.pyplot', 'IPython', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run.png")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [diagnostics, pictures, run_history], ids=lambda module: module.__name__)
def test_the_examples_are_true(module):
    assert doctest.testmod(module).failed == 0


# Success rates


def test_success_histogram_by_hand():
    """G = 4: 0, 1/4, 2/4, 3/4, 4/4, and 1/8 and 7/8 by partial credit."""
    rows = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0.5, 0, 0, 0], [1, 1, 1, 0.5]]
    assert success_histogram(make_groups([[float(value) for value in row] for row in rows])) == [1, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_quarter_is_a_quarter(dtype):
    rewards_PG = torch.tensor([[1.0] * 3 + [0.0] * 9, [1.0] * 9 + [0.0] * 3], dtype=dtype)
    assert success_histogram(RewardGroups(rewards_PG)) == [0, 1, 0, 1, 0, 0]


def test_groups_that_cannot_be_counted_are_not():
    nan = float("nan")
    assert success_histogram(make_groups([[1.0, nan, nan], [nan] * 3, [1.0, nan, 0.0]])) == [0, 0, 1, 0, 0, 0]
    assert success_histogram(make_groups([[3.0, 0.0], [1.0, 0.0]])) == [0] * 6  # no correctness signal
    unknown = RewardGroups(torch.ones(2, 2), torch.tensor([[nan, nan], [1.0, 1.0]]))
    assert success_histogram(unknown) == [0, 0, 0, 0, 0, 1]


def test_a_tally_without_success_has_no_histogram():
    tally = BatchTally()
    tally.add(1, make_groups([[3.0, 0.0]]), torch.zeros(1, 2))
    assert tally.histogram().counts == []
    assert BatchTally().histogram().edges == []


def test_a_tally_speaks_like_the_log():
    (first, _, _) = make_tally().logs()
    assert first == {"step": 1, "reward": 0.75, **collapse_metrics(MIXED, torch.zeros(2, 2))}
    assert [entry["step"] for entry in make_tally().logs(after_step=2)] == [3]


# grpo-ext plot


@pytest.fixture(autouse=True)
def reward_log(monkeypatch):
    """A stand-in for the reward log, at first without batches; a batch is generated before the step it trains."""
    log = SimpleNamespace(steps=[])
    monkeypatch.setattr("grpo_ext.cli.plot.has_log", lambda run: bool(log.steps))
    monkeypatch.setattr("grpo_ext.cli.plot.read_batches", lambda run: map(make_batch, log.steps))
    return log


def make_batch(step: int) -> LoggedBatch:
    return LoggedBatch(step, step - 1, 1, MIXED, torch.zeros(2, 2), None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))
    )
    return figures


def write_state(folder, logs):
    folder.mkdir(exist_ok=True)
    content = {"global_step": logs[-1]["step"] if logs else 0, "log_history": logs}
    (folder / "trainer_state.json").write_text(json.dumps(content))


def test_plot_draws_a_folder(tmp_path, capsys, drawn):
    write_state(tmp_path, make_logs("reward", "collapse", "threshold"))
    main([str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert out == ["For success rates over time, train with `--log_rewards true`.", str(tmp_path / "run.png")]
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    assert figure.get_suptitle() == tmp_path.name
    assert len(figure.axes) == 3


@pytest.mark.parametrize(("name", "start"), [("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("A.PNG", b"\x89PNG")])
def test_plot_writes_what_the_name_says(tmp_path, name, start):
    write_state(tmp_path, make_logs("reward"))
    main([str(tmp_path), "--output", str(tmp_path / name)])
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_log_that_got_further_is_drawn(tmp_path, drawn):
    """A finished run's state is newer than its checkpoints; a continued run's newest checkpoint is newer than that."""
    logs = make_logs("reward")
    write_state(tmp_path / "checkpoint-2", logs[:2])
    write_state(tmp_path, logs[:3])
    main([str(tmp_path)])
    write_state(tmp_path / "checkpoint-10", logs)
    main([str(tmp_path)])
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text('{"global_step": 11, "log_hi')
    main([str(tmp_path)])
    assert [line(figure.axes[0], "training")[0] for figure in drawn] == [STEPS[:3], STEPS, STEPS]


def test_the_reward_log_goes_on_where_the_logs_end(tmp_path, drawn, reward_log, capsys):
    write_state(tmp_path, make_logs("reward", "collapse", "threshold"))
    reward_log.steps = [1, 2, 3, 4, 5, 6]
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'run.png'}\n"
    reward, _, threshold, histogram = drawn[0].axes[:4]
    assert line(reward, "training") == ([1, 2, 3, 4, 5, 6], [*REWARD, 0.75, 0.75])
    assert line(threshold, "threshold")[0] == STEPS
    assert histogram.collections[0].get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_the_reward_log_alone_suffices(tmp_path, drawn, reward_log):
    reward_log.steps = [1, 2]
    main([str(tmp_path)])
    assert labels(drawn[0])[:3] == [PANELS["reward"], PANELS["collapse"], PANELS["histogram"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}"], "RUN should hold logged steps, found neither .* nor a reward log in .*: pass"),
        (["{}/none"], "RUN should be the folder of a run, found .*none., which is none: pass"),
        (["{}", "--output", "a.gif"], "`--output` should end in .png, .pdf, .svg, found `a.gif`"),
        (["{}/run", "--output", "{}/none/a.png"], "No such file"),
        ([], "The command line should be valid, found .*RUN"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, arguments, message):
    write_state(tmp_path / "run", make_logs("reward"))
    write_state(tmp_path, [])
    with pytest.raises(SystemExit, match=f"error: .*{message}") as caught:
        main([argument.format(tmp_path) for argument in arguments])
    assert "\n" not in str(caught.value)


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, monkeypatch):
    write_state(tmp_path, make_logs("reward", "collapse"))
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=r"error: .*`pip install 'grpo-ext\[plot\]'`"):
        main([str(tmp_path)])
    assert save_picture(make_logs("reward", "collapse"), tmp_path, "a run") is None


def test_the_command_is_wired(tmp_path, monkeypatch, capsys):
    from grpo_ext.cli import main as grpo_ext

    write_state(tmp_path, make_logs("reward"))
    monkeypatch.setattr(sys, "argv", ["grpo-ext", "plot", str(tmp_path)])
    grpo_ext()
    assert "run.png" in capsys.readouterr().out


def test_the_picture_at_the_end_of_training_is_the_same(tmp_path, drawn):
    path = save_picture(make_logs("reward", "collapse", "anchor"), tmp_path, "HADW")
    assert path == tmp_path / "reward_and_collapse.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert labels(drawn[0]) == [PANELS["reward"], PANELS["collapse"], PANELS["anchor"]]
    assert save_picture(make_logs("reward"), tmp_path, "stock") is None


# Live in a notebook


class Shell:
    def __init__(self, *traits):
        self.traits = traits

    def has_trait(self, name):
        return name in self.traits


@pytest.fixture
def notebook(monkeypatch):
    """A stand-in for IPython with a kernel: what it showed, in order."""
    shown = []
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.display, ipython.shell = display, Shell("kernel")
    ipython.get_ipython = lambda: ipython.shell
    ipython.shown = shown
    display.Image = bytes
    display.DisplayHandle = lambda: SimpleNamespace(
        display=lambda image: shown.append(("display", image)), update=lambda image: shown.append(("update", image))
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return ipython


def train(callback, num_steps=4, is_main=True):
    """What a trainer tells a callback."""
    state, control = TrainerState(is_world_process_zero=is_main), TrainerControl()
    callback.on_train_begin(None, state, control)
    for entry in make_logs("reward", "collapse")[:num_steps]:
        batch = {"groups": MIXED, "advantages_PG": torch.zeros(2, 2), "history": CollapseHistory()}
        callback.on_advantages(None, state, control, **batch)
        state.global_step = entry["step"]
        state.log_history.append(entry)
        callback.on_log(None, state, control, logs=entry)
    callback.on_train_end(None, state, control)


def test_a_live_picture_is_updated_in_its_place(notebook, drawn):
    train(LivePictureCallback(every=3))
    assert [verb for verb, _ in notebook.shown] == ["display", "update", "update"]  # steps 1 and 4, and the end
    assert all(image.startswith(b"\x89PNG") for _, image in notebook.shown)
    assert drawn[0] is drawn[2]
    assert line(drawn[2].axes[0], "training") == (STEPS, REWARD)
    assert drawn[2].axes[2].collections[0].get_coordinates()[0, :, 0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize("shell", [None, Shell()], ids=["plain", "terminal"])
def test_a_live_picture_outside_a_notebook_does_nothing(notebook, shell):
    notebook.shell = shell
    train(LivePictureCallback(every=1))
    assert notebook.shown == []


def test_a_live_picture_never_imports_ipython(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    train(LivePictureCallback(every=1))
    assert "IPython" not in sys.modules


def test_only_the_main_process_shows_a_live_picture(notebook):
    train(LivePictureCallback(every=1), is_main=False)
    assert notebook.shown == []


def test_a_live_picture_needs_a_step_and_matplotlib(notebook, monkeypatch):
    with pytest.raises(ValueError, match="`every` should be at least 1, found 0: use 5, the default"):
        LivePictureCallback(every=0)
    train(LivePictureCallback(), num_steps=0)
    assert notebook.shown == []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install"):
        train(LivePictureCallback())
