"""Generation batches of a known shape, as TRL buffers them: lognormal lengths, some groups without a signal."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """
    Args:
        num_rows (`int`), num_generations (`int`):
            Completions, and those of one prompt.
        prompt (`tuple[int, int]`):
            Shortest and longest prompt.
        mean (`float`), sigma (`float`), cap (`int`):
            Of the completions' lognormal lengths, and where they are cut.
        vocabulary (`int`):
            Number of token ids.
    """

    num_rows: int = 40
    num_generations: int = 4
    prompt: tuple[int, int] = (20, 100)
    mean: float = 155.0
    sigma: float = 0.8
    cap: int = 512
    vocabulary: int = 2048


def draw(shape: Shape, live: float, seed: int) -> dict[str, Tensor]:
    """A generation batch in which this share of the groups has advantages, in an order like TRL's after shuffling."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high + 1, (size,), generator=generator)

    num_groups = shape.num_rows // shape.num_generations
    prompts_B = uniform(*shape.prompt, num_groups).repeat_interleave(shape.num_generations)
    noise_B = torch.randn(shape.num_rows, generator=generator)
    location = torch.tensor(shape.mean).log() - shape.sigma**2 / 2
    completions_B = (location + shape.sigma * noise_B).exp().round().clamp(1, shape.cap).long()
    is_live_P = torch.arange(num_groups) < round(live * num_groups)
    is_live_B = is_live_P[torch.randperm(num_groups, generator=generator)].repeat_interleave(shape.num_generations)
    advantages_B = torch.randn(shape.num_rows, generator=generator) * is_live_B

    def ids(lengths_B: Tensor) -> Tensor:
        return torch.randint(3, shape.vocabulary, (shape.num_rows, int(lengths_B.max())), generator=generator)

    def mask(lengths_B: Tensor) -> Tensor:
        return (torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)).long()

    batch = {
        "prompt_ids": ids(prompts_B),
        "prompt_mask": mask(prompts_B).flip(1),
        "completion_ids": ids(completions_B),
        "completion_mask": mask(completions_B),
        "advantages": advantages_B,
    }
    for side in ("prompt", "completion"):
        batch[f"{side}_ids"] *= batch[f"{side}_mask"]
    order = torch.randperm(shape.num_rows, generator=generator)
    return {name: value[order] for name, value in batch.items()} | {"num_items_in_batch": completions_B.sum()}
