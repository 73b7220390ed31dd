"""The benchmarks run, small, and write what they promise."""

import json
import sys

import drift
import pytest
import update
from _launch import ROOT, run
from rollouts import Shape
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)


def test_the_update_phase(tmp_path, monkeypatch, capsys):
    shape = Shape(num_rows=16, mean=12, cap=40, prompt=(3, 9), vocabulary=64)
    monkeypatch.setitem(update.MODELS, "tiny", (LlamaForCausalLM, SMALL, shape, 4))
    monkeypatch.setattr(sys, "argv", ["update.py", "--repetitions", "2", "--output", str(tmp_path / "update.json")])
    monkeypatch.setattr(update, "STEADY", (0.0, 100.0))  # so small that it is all noise
    update.main()
    found = json.loads((tmp_path / "update.json").read_text())
    assert [row["live"] for row in found["rows"]] == [0.2, 0.5, 0.8, 1.0]
    for row in found["rows"]:
        assert 0 < row["padded_tokens"]["median"] < 1
        assert 1 <= row["padded_over_needed"]["low"] < 1.5
        assert row["memory"]["high"] <= 1
        assert row["time"]["median"] > 0
    assert found["rows"][1]["memory"]["high"] < 1
    assert found["mc_grpo"]["padded_against_ours_without_pivot"]["high"] <= 1
    assert found["machine"]["threads"] > 0
    assert (tmp_path / "update.png").stat().st_size > 10_000
    assert "| 0.2 | " in capsys.readouterr().out


def test_the_share_of_our_own_code(tmp_path):
    """In a process of its own, since it puts clocks into TRL's class; with a step of half a second, below a percent."""
    words = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--steps", "2", "--output", str(tmp_path / "o")]
    done = run(words)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = json.loads((tmp_path / "o").read_text())["inside_our_code"]
    assert shares["stock"] == shares["stock again"] == 0
    assert 0 < shares["ours, compact_updates=False"] < 0.02
    assert 0 < shares["ours"] < 0.04


def test_drift(monkeypatch):
    """Same tokens, and weights that are not the same bits: the two runs were two."""
    monkeypatch.setattr(sys, "argv", ["drift.py"])
    row = drift.compare(seed=0, steps=2)
    assert row["first_step_with_a_differing_token"] is None
    assert 0 < row["largest_weight_difference"] < 1e-4
    assert row["reward"] == pytest.approx(row["reward_without"])
