"""Ranks as threads of one process."""

import threading

import torch
from torch import Tensor


class Ranks:
    """The gathering of tensors among threads."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.tensors: list[Tensor] = [torch.empty(0)] * num_ranks

    def gather(self, rank: int, tensor: Tensor) -> Tensor:
        self.tensors[rank] = tensor
        self.barrier.wait()
        gathered = torch.cat([each.reshape(-1, *each.shape[1:]) for each in self.tensors])
        self.barrier.wait()
        return gathered
