"""
The rules of the early warning, those about single causes among them: evidence to sentences, or None.

The first sentence says what happens, with the numbers; the others say what to change, as far as the numbers carry it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_ext.early_warning.collapse import all_correct, all_incorrect, constant_reward, early_collapse, late_collapse
from grpo_ext.early_warning.evidence import ENTROPIES, Evidence
from grpo_ext.early_warning.tally import lower_bound


def one_group(evidence: Evidence) -> str | None:
    """AVSPO runs on batches of one group."""
    # A small excess is what is left of dividing by the scored share.
    if not 0 < evidence.max_groups < 1.5:
        return None
    return (
        "Each generation batch holds one group, so its collapse rate is 0 or 1 and AVSPO's threshold "
        "(`acr_threshold_init`) cannot act. Raise `gradient_accumulation_steps` (or `per_device_train_batch_size`), so "
        "that a generation batch is at least four times `num_generations`."
    )


def float_noise(evidence: Evidence) -> str | None:
    """Equal rewards whose advantages are rounding errors of their mean."""
    last, limits = evidence.last, evidence.limits
    if not last.exceeds("acr/float_noise", limits.float_noise, limits.z):
        return None
    size = last.mean("advantage/abs_max")
    size_text = f", up to {size:.2g} in size" if last.mean("acr/float_noise") > 0.99 and size == size else ""
    return (
        f"{last.mean('acr/float_noise'):.0%} of the groups of {last.span} have equal rewards, yet train on "
        f"advantages{size_text} that are rounding errors of the mean. Use rewards that are exact in float32 (0 and 1, "
        'halves, quarters), or `scale_rewards="none"`, where nothing divides the error by the eps of 0.0001.'
    )


def unscorable(evidence: Evidence) -> str | None:
    """Groups with fewer than two rewards."""
    name, last, limits = "groups/frac_unscorable", evidence.last, evidence.limits
    if not last.exceeds(name, limits.unscorable, limits.z):
        return None
    return (
        f"{last.mean(name):.0%} of the groups of {last.span} have fewer than two completions with a reward, so there "
        "is nothing to compare, and no collapse rate counts them. Let the reward functions return a number (0 for an "
        "answer that cannot be read) where they return None now."
    )


def duplicates(evidence: Evidence) -> str | None:
    """Nearly all that could be copies are copies, and the groups collapse."""
    name, last, limits = "completions/frac_duplicates", evidence.last, evidence.limits
    possible = 1 - 1 / max(last.mean("groups/size"), 1.0)
    copied = lower_bound(min(1.0, last.mean(name) / possible), last.cases(name), limits.z) if possible else 0.0
    if copied <= limits.duplicates or not last.exceeds("acr/rate", limits.collapse, limits.z):
        return None
    return (
        f"{last.mean(name):.0%} of the completions of {last.span} repeat another of their group word for word "
        f"({possible:.0%} would be all but one), and {last.mean('acr/rate'):.0%} of the groups have equal rewards. "
        "Raise `temperature` (and `top_p` or `top_k`, where set); a larger `num_generations` would buy more copies."
    )


def entropy_collapse(evidence: Evidence) -> str | None:
    """Every one of the last log lines lies far below the first ones."""
    return _describe_entropy(evidence, falls=True)


def entropy_explosion(evidence: Evidence) -> str | None:
    """Every one of the last log lines lies far above the first ones."""
    return _describe_entropy(evidence, falls=False)


def _describe_entropy(evidence: Evidence, falls: bool) -> str | None:
    limits = evidence.limits
    for name in ENTROPIES:
        first, last = sorted(evidence.first_entropies[name]), sorted(evidence.last_entropies[name])
        if len(last) < limits.entropy_lines:
            continue
        before, after = first[len(first) // 2], last[len(last) // 2]
        scope = ", over the rows with an advantage alone" if name == "entropy_live" else ""
        what = f"from {before:.2g} to {after:.2g} nats per token (`{name}`{scope}; medians of {len(last)} log lines)."
        if falls and last[-1] < limits.entropy_fall * before:
            return (
                f"The entropy collapsed {what} The completions of a group become alike, and a group that is alike "
                "teaches nothing: raise `temperature`, or lower `learning_rate`."
            )
        if not falls and last[0] > max(limits.entropy_rise * before, limits.entropy_high):
            return (
                f"The entropy exploded {what} The policy drifts towards random tokens: lower `learning_rate`, set a "
                "`beta` above 0, and lower `entropy_coef` where it is set."
            )
    return None


@dataclass(frozen=True)
class Rule:
    """A rule, the metrics without which it is silent (one of each alternative), and the batches it waits for."""

    find: Callable[[Evidence], str | None]
    needs: tuple[str, ...]
    windows: int = 0
    unless: tuple[str, ...] = ()
    """Rules that have said as much."""

    def silence(self, evidence: Evidence) -> str | None:
        """Why the rule cannot speak yet, None where it can."""
        missing = [name for name in self.needs if not set(name.split(" or ")) & evidence.seen]
        if missing:
            return f"no {', '.join(missing)} in the log"
        batches = max(self.windows * evidence.limits.window, evidence.limits.min_batches)
        if evidence.num_seen < batches and "acr/rate" in self.needs:
            return f"needs {batches} batches, found {evidence.num_seen}"
        lines = 2 * evidence.limits.entropy_lines
        found = sum(len(evidence.first_entropies[name]) + len(evidence.last_entropies[name]) for name in ENTROPIES)
        if "acr/rate" not in self.needs and found < lines:
            return f"needs {lines} log lines, found {found}"
        return None


ENTROPY = (" or ".join(ENTROPIES),)

RULES = {
    "constant_reward": Rule(constant_reward, ("acr/rate", "reward")),
    "early_collapse": Rule(early_collapse, ("acr/rate",)),
    "all_correct": Rule(all_correct, ("acr/rate", "acr/all_correct"), windows=2),
    "all_incorrect": Rule(all_incorrect, ("acr/rate", "acr/all_incorrect"), windows=2),
    "late_collapse": Rule(
        late_collapse, ("acr/rate",), windows=2, unless=("early_collapse", "all_correct", "all_incorrect")
    ),
    "one_group": Rule(one_group, ("acr/rate", "avspo/threshold", "groups/num")),
    "float_noise": Rule(float_noise, ("acr/rate", "acr/float_noise")),
    "unscorable": Rule(unscorable, ("acr/rate", "groups/frac_unscorable")),
    "duplicates": Rule(duplicates, ("acr/rate", "completions/frac_duplicates", "groups/size")),
    "entropy_collapse": Rule(entropy_collapse, ENTROPY),
    "entropy_explosion": Rule(entropy_explosion, ENTROPY),
}
"""Every rule by its name; the order is the order of speaking."""
