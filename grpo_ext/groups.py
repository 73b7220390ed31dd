"""The rewards of one gathered generation batch, by group.

Axes: P prompts in the gathered batch, G completions per prompt, N = P * G rows (group-major: the completions
of one prompt are neighbours), B rows of this rank, F reward functions, T tokens, 1 a kept dimension.
A tensor's name ends in its axes: `rewards_PG`, `baseline_P1`. NaN marks an unscorable row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SUCCESS_TOLERANCE = 1e-6


class RewardGroups:
    """
    Rewards of one gathered generation batch and what estimators may need beside them.

    Args:
        rewards_PG (`torch.Tensor`):
            Weighted sum over reward functions, shape (P, G), NaN where unscorable. Integers become float32.
        success_PG (`torch.Tensor`, *optional*):
            Correctness in [0, 1], shape (P, G). When absent it is `rewards_PG`.
        lengths_PG (`torch.Tensor`, *optional*):
            Completion lengths in tokens, shape (P, G).
        rewards_PGF (`torch.Tensor`, *optional*):
            Unweighted rewards per function, shape (P, G, F), NaN where a function abstained.
        reward_weights_F (`torch.Tensor`, *optional*):
            Weights of the reward functions, shape (F,).
        prompt_ids_P (`list[str]`, *optional*):
            A stable id per prompt.
        is_truncated_PG (`torch.Tensor`, *optional*):
            Completions that did not end by themselves, bool (P, G).
        completion_keys_PG (`torch.Tensor`, *optional*):
            Whole numbers (P, G), equal where two completions have the same tokens.
        progress (`float`, *optional*):
            Share of the training steps that are done, in [0, 1].
        reward_range (`float`, *optional*, defaults to `1.0`):
            `reward_max - reward_min`.

    Raises:
        `ValueError`: for an infinite reward, or a field whose shape does not fit `rewards_PG`.

    Example:
        >>> groups = RewardGroups(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        >>> groups.success_PG.mean(dim=1).tolist()
        [0.5, 0.0]
    """

    def __init__(
        self,
        rewards_PG: Tensor,
        success_PG: Tensor | None = None,
        lengths_PG: Tensor | None = None,
        *,
        rewards_PGF: Tensor | None = None,
        reward_weights_F: Tensor | None = None,
        prompt_ids_P: list[str] | None = None,
        is_truncated_PG: Tensor | None = None,
        completion_keys_PG: Tensor | None = None,
        progress: float | None = None,
        reward_range: float = 1.0,
    ) -> None:
        self.rewards_PG = rewards_PG if rewards_PG.is_floating_point() else rewards_PG.float()
        self.lengths_PG = lengths_PG
        self.rewards_PGF = rewards_PGF
        self.reward_weights_F = reward_weights_F
        self.prompt_ids_P = prompt_ids_P
        self.is_truncated_PG = is_truncated_PG
        self.completion_keys_PG = completion_keys_PG
        self.progress = progress
        self.reward_range = reward_range
        self._success_PG = success_PG
        self._check_shapes()
        for rewards in (self.rewards_PG, self.rewards_PGF):
            if rewards is not None and rewards.isinf().any():
                prompt, completion = rewards.isinf().nonzero()[0].tolist()[:2]
                value = rewards[rewards.isinf()][0].item()
                raise ValueError(
                    f"Rewards should be finite, or NaN where unscorable, found {value} for completion {completion} of "
                    f"prompt {prompt}: let the reward function return None for such a row."
                )

    @classmethod
    def from_functions(
        cls, rewards_NF: Tensor, reward_weights_F: Tensor, num_generations: int, **fields: object
    ) -> "RewardGroups":
        """Groups the gathered rewards (N, F) of all functions; a row nobody scored becomes NaN."""
        rewards_N = (rewards_NF * reward_weights_F).nansum(dim=1)
        rewards_N[rewards_NF.isnan().all(dim=1)] = torch.nan
        return cls(
            rewards_N.view(-1, num_generations),
            rewards_PGF=rewards_NF.view(-1, num_generations, rewards_NF.shape[1]),
            reward_weights_F=reward_weights_F,
            **{name: cls._group(value, num_generations) for name, value in fields.items()},  # type: ignore[arg-type]
        )

    @staticmethod
    def _group(value: object, num_generations: int) -> object:
        return value.view(-1, num_generations) if isinstance(value, Tensor) else value

    @property
    def is_scored_PG(self) -> Tensor:
        """Rows with a reward, bool (P, G)."""
        return ~self.rewards_PG.isnan()

    @property
    def success_PG(self) -> Tensor:
        """
        Correctness in [0, 1], shape (P, G), NaN where a row has none.

        Raises:
            `ValueError`: where a value lies outside [0, 1].
        """
        if self.success_error is not None:
            raise ValueError(self.success_error)
        return self._raw_success_PG.clamp(0.0, 1.0)

    @property
    def success_error(self) -> str | None:
        """Why `success_PG` cannot be read, or None."""
        success_PG = self._raw_success_PG
        outside_PG = (success_PG < -SUCCESS_TOLERANCE) | (success_PG > 1.0 + SUCCESS_TOLERANCE)
        if not outside_PG.any():
            return None
        source = "the reward" if self._success_PG is None else "the success signal"
        return (
            f"The correctness of a completion should lie in [0, 1], found {success_PG[outside_PG][0].item():g} in "
            f"{source}: set `success_reward` to the reward function that tells right from wrong, and `reward_min` and "
            "`reward_max` to its bounds."
        )

    @property
    def _raw_success_PG(self) -> Tensor:
        if self._success_PG is None:
            return self.rewards_PG
        return self._success_PG.to(self.rewards_PG.dtype).masked_fill(~self.is_scored_PG, torch.nan)

    def restrict(self, advantages_PG: Tensor) -> Tensor:
        """Advantages that are finite where scored (0 where undefined) and NaN where unscorable, shape (P, G)."""
        return advantages_PG.masked_fill(advantages_PG.isnan(), 0.0).masked_fill(~self.is_scored_PG, torch.nan)

    def first(self, num_generations: int) -> "RewardGroups":
        """The same batch with the first completions of each prompt only."""
        tensors = {
            "success_PG": self._success_PG,
            "lengths_PG": self.lengths_PG,
            "rewards_PGF": self.rewards_PGF,
            "is_truncated_PG": self.is_truncated_PG,
            "completion_keys_PG": self.completion_keys_PG,
        }
        return RewardGroups(
            self.rewards_PG[:, :num_generations],
            **{name: None if tensor is None else tensor[:, :num_generations] for name, tensor in tensors.items()},
            reward_weights_F=self.reward_weights_F,
            prompt_ids_P=self.prompt_ids_P,
            progress=self.progress,
            reward_range=self.reward_range,
        )

    def _check_shapes(self) -> None:
        if self.rewards_PG.dim() != 2:
            raise ValueError(
                f"`rewards_PG` should have the shape (prompts, completions), found {tuple(self.rewards_PG.shape)}: "
                "reshape the rewards so that each row holds one prompt's completions."
            )
        for name, value in (
            ("success_PG", self._success_PG),
            ("lengths_PG", self.lengths_PG),
            ("rewards_PGF", self.rewards_PGF),
            ("is_truncated_PG", self.is_truncated_PG),
            ("completion_keys_PG", self.completion_keys_PG),
        ):
            if value is not None and value.shape[:2] != self.rewards_PG.shape:
                raise ValueError(
                    f"`{name}` should begin with the shape of `rewards_PG`, {tuple(self.rewards_PG.shape)}, found "
                    f"{tuple(value.shape)}: pass one value per completion."
                )


@dataclass(frozen=True)
class RewardSettings:
    """
    How the values of several reward functions become one reward, and tell right from wrong.

    Args:
        weights (`list[float]`):
            One weight per reward function.
        success_column (`int`, *optional*):
            The function that tells right from wrong. None: the weighted sum.
        reward_min, reward_max (`float`, *optional*, defaults to `0.0` and `1.0`):
            Its value for a wrong and for a right answer.
    """

    weights: list[float]
    success_column: int | None = None
    reward_min: float = 0.0
    reward_max: float = 1.0

    def group(self, rewards_NF: Tensor, num_generations: int, **fields: object) -> RewardGroups:
        """The gathered rewards (N, F) of a generation batch by group; `fields` are `RewardGroups`' own, by row."""
        weights_F = torch.tensor(self.weights, dtype=torch.float32, device=rewards_NF.device)
        return RewardGroups.from_functions(
            rewards_NF,
            weights_F,
            num_generations,
            success_PG=self._success(rewards_NF, weights_F),
            reward_range=self.reward_max - self.reward_min,
            **fields,
        )

    def _success(self, rewards_NF: Tensor, weights_F: Tensor) -> Tensor | None:
        """The success signal (N,) where the user has set one up, else None."""
        if self.success_column is None and (self.reward_min, self.reward_max) == (0.0, 1.0):
            return None
        if self.success_column is not None:
            column_N = rewards_NF[:, self.success_column]
        else:
            column_N = (rewards_NF * weights_F).nansum(dim=1)
        return (column_N - self.reward_min) / (self.reward_max - self.reward_min)
