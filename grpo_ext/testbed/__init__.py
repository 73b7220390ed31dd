"""The embedded default: a tiny policy and an arithmetic task, both inside the package."""

from pathlib import Path

POLICY_PATH = Path(__file__).parent / "policy"
