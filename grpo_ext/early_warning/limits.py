"""From where on the early warning speaks. Python's numbers alone."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """
    From where on a figure is worth a sentence.

    Args:
        early_batches (`int`, *optional*, defaults to `100`):
            Batches that count as early, as in arXiv 2605.21125.
        window (`int`, *optional*, defaults to `50`):
            Batches of the first and of the last window, which are compared with each other.
        min_batches (`int`, *optional*, defaults to `10`):
            Batches before the first sentence: one odd batch is no run.
        z (`float`, *optional*, defaults to `4.0`):
            Standard errors beyond a limit: a run is looked at thousands of times.
        collapse (`float`, *optional*, defaults to `0.5`):
            Collapse rate, and share of all-correct or all-incorrect groups after a rise: half the sampling is wasted.
        rise (`float`, *optional*, defaults to `0.2`):
            Smallest rise between the windows that is told of.
        repaired (`float`, *optional*, defaults to `0.25`):
            The method repairs the collapse where `acr/after` is at most this part of `acr/rate`.
        constant_groups (`int`, *optional*, defaults to `20`):
            Groups of one and the same reward before it is called constant.
        float_noise (`float`, *optional*, defaults to `0.05`):
            Share of groups with equal rewards that train on rounding errors.
        unscorable (`float`, *optional*, defaults to `0.2`):
            Share of groups with fewer than two rewards.
        duplicates (`float`, *optional*, defaults to `0.9`):
            Share of the possible copies (all but one completion of each group) that are copies.
        entropy_lines (`int`, *optional*, defaults to `5`):
            Log lines at each end whose entropy is compared; all of the last have to be beyond the limit.
        entropy_fall (`float`, *optional*, defaults to `0.2`):
            Part of the first entropy below which it has collapsed.
        entropy_rise (`float`, *optional*, defaults to `3.0`):
            Multiple of the first entropy above which it has exploded.
        entropy_high (`float`, *optional*, defaults to `1.0`):
            Nats per token that an explosion reaches at least.

    Raises:
        `ValueError`: for a limit that is not above 0.
    """

    early_batches: int = 100
    window: int = 50
    min_batches: int = 10
    z: float = 4.0
    collapse: float = 0.5
    rise: float = 0.2
    repaired: float = 0.25
    constant_groups: int = 20
    float_noise: float = 0.05
    unscorable: float = 0.2
    duplicates: float = 0.9
    entropy_lines: int = 5
    entropy_fall: float = 0.2
    entropy_rise: float = 3.0
    entropy_high: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                default = f"{item.default:g}"
                raise ValueError(f"`{item.name}` should be above 0, found {value}: use {default}, the default.")
