"""
Early warning: what goes wrong in a run, once and in plain words. Python's numbers alone, no torch.

The early collapse and the forecast are those of arXiv 2605.21125 (AVSPO and the advantage collapse rate).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from grpo_ext.early_warning.evidence import LOGGED, Evidence
from grpo_ext.early_warning.limits import Limits
from grpo_ext.early_warning.rules import RULES

__all__ = ["LOGGED", "RULES", "EarlyWarning", "Finding", "Limits", "check_rules", "forecast"]


@dataclass(frozen=True)
class Finding:
    """What a rule found."""

    name: str
    text: str


@dataclass
class EarlyWarning:
    """
    Watches the metrics of a run; each rule of `RULES` speaks once.

    A metric that is missing silences the rules that need it.

    Args:
        limits (`Limits`, *optional*):
            From where on a figure is worth a sentence.
        start (`int`, *optional*, defaults to `0`):
            Batches of the run before the first one that is watched, which silences the rules about a run's beginning.

    Example:
        >>> watch = EarlyWarning()
        >>> found = [watch.observe({"acr/rate": 1.0, "reward": 0.0, "groups/num": 4.0}) for _ in range(10)]
        >>> [finding.name for finding in found[-1]]
        ['constant_reward']
    """

    limits: Limits = field(default_factory=Limits)
    start: int = 0

    def __post_init__(self) -> None:
        self._evidence = Evidence(self.limits, self.start)
        self._spoken: set[str] = set()

    def observe(self, metrics: dict[str, float], num_batches: int = 1) -> list[Finding]:
        """
        Counts the metrics of one generated training batch (or the means over several), or those of a log line.

        Args:
            metrics (`dict[str, float]`):
                Metrics by name. With `acr/rate` it counts as a batch, without as a log line.
            num_batches (`int`, *optional*, defaults to `1`):
                Batches that the metrics are means over.

        Returns:
            `list[Finding]`: what was not said before.
        """
        self._evidence.add(metrics, num_batches)
        findings = []
        for name, rule in RULES.items():
            if self._spoken & {name, *rule.unless} or rule.silence(self._evidence) is not None:
                continue
            text = rule.find(self._evidence)
            if text is not None:
                self._spoken.add(name)
                findings.append(Finding(name, text))
        return findings

    def silent(self) -> dict[str, str]:
        """The rules that could not look yet, each with the reason."""
        reasons = {name: rule.silence(self._evidence) for name, rule in RULES.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None and name not in self._spoken}


def check_rules(names: Collection[str]) -> tuple[str, ...]:
    """
    Names of rules as they are.

    Raises:
        `ValueError`: for a name that is none.
    """
    for name in [names] if isinstance(names, str) else names:
        if name not in RULES:
            raise ValueError(f"`stop_on` should name rules, found {name!r}: use one of {', '.join(RULES)}.")
    return (names,) if isinstance(names, str) else tuple(names)


def forecast(first_100: float) -> str:
    """
    The paper's forecast of final accuracy, with its scope (arXiv 2605.21125: 51.4 - 29.6 ACR, R2 0.617).

    Args:
        first_100 (`float`):
            Mean collapse rate over the first 100 generation batches, in [0, 1].

    Raises:
        `ValueError`: for a rate outside [0, 1].
    """
    if not 0 <= first_100 <= 1:
        raise ValueError(f"`first_100` should lie in [0, 1], found {first_100}: pass the metric `acr/first_100`.")
    return (
        f"Forecast of arXiv 2605.21125: {51.4 - 29.6 * first_100:.1f} % final accuracy (51.4 - 29.6 x {first_100:.2f}, "
        "the collapse rate over the first 100 batches). It is a straight line through that paper's 245 runs (models of "
        "0.5B to 14B trained on MATH, accuracy on MATH-500) with R2 0.617, and says nothing about another setting."
    )
