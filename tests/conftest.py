"""What every test shares: one thread, no network, and the shipped policy as the tiny model."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """accelerate collects garbage after every training; what was imported before need not be looked at again."""
    gc.collect()
    gc.freeze()
