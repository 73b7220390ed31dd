"""
The rules of the early warning: each looks at the evidence and returns its sentences, or None.

The first sentence says what happens, with the numbers; the others say what to change, as far as the numbers carry it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_ext.evidence import ENTROPIES, Evidence, Tally, rise_z

PREFLIGHT = "`grpo-ext preflight` finds the problems that the model always or never solves"


def constant_reward(evidence: Evidence) -> str | None:
    """Every completion since the first batch got the same reward."""
    limits, reward = evidence.limits, evidence.constant_reward
    if not evidence.is_constant or reward is None or evidence.constant_groups < limits.constant_groups:
        return None
    what = (
        f"The reward has been {reward:g} for every completion of the first {evidence.num_batches} batches "
        f"({evidence.constant_groups:.0f} groups), so nothing tells a better completion from a worse one."
    )
    if reward == 0:
        return (
            f"{what} Either the reward function misses right answers or every problem is out of reach: call the reward "
            f"function by hand on a completion that is right; if that gives more than 0, take easier problems "
            f"({PREFLIGHT})."
        )
    return (
        f"{what} Either the reward function does not look at the answer or all completions deserve the same: call the "
        f"reward function by hand on a right and on a wrong completion; if they differ, take other problems "
        f"({PREFLIGHT})."
    )


def early_collapse(evidence: Evidence) -> str | None:
    """The collapse rate of the first batches lies above the limit."""
    early, limits = evidence.early, evidence.limits
    if evidence.is_constant or not early.exceeds("acr/rate", limits.collapse, limits.z):
        return None
    shares = [(early.mean(f"acr/{cause}"), cause.replace("_", " ")) for cause in ("all_correct", "all_incorrect")]
    causes = ", ".join(f"{share:.0%} {cause}" for share, cause in shares if share == share)
    what = (
        f"Early collapse: the rewards of {early.mean('acr/rate'):.0%} of the {early.cases('acr/rate'):.0f} groups of "
        f"{early.span} are equal{f' ({causes})' if causes else ''}, and equal rewards teach nothing by themselves."
    )
    return " ".join([what, *_say_after(evidence), _remedy(early)])


def _say_after(evidence: Evidence) -> list[str]:
    """Whether the method repairs the collapse; what else would, where the evidence asks for it."""
    early, is_avspo = evidence.early, "avspo/threshold" in evidence.seen
    rate, after = early.mean("acr/rate"), early.mean("acr/after")
    if after <= evidence.limits.repaired * rate:
        return [f"The method repairs that already: {after:.0%} are without an advantage after it, so keep it."]
    if early.mean("acr/all_incorrect") > rate / 3 and not is_avspo:
        return ["`--method avspo` gives such groups an advantage."]
    return []


def _remedy(early: Tally) -> str:
    """What to change about data, sampling or reward, by the cause of two thirds of the collapse."""
    most = 2 / 3 * early.mean("acr/rate")
    if not early.cases("acr/all_correct"):
        return (
            f"Whether they are all correct or all incorrect was not logged (the mean reward is "
            f"{early.mean('reward'):.2f}); {PREFLIGHT}."
        )
    if early.mean("acr/all_correct") >= most:
        return f"Most of them are all correct, so the data are too easy: take harder problems ({PREFLIGHT})."
    if early.mean("acr/all_incorrect") >= most:
        return (
            "Most of them are all incorrect, so the data are too hard or the reward misses right answers: call the "
            f"reward function by hand on one, then take easier problems ({PREFLIGHT}) or a larger `num_generations`."
        )
    if early.mean("acr/other") >= most:
        return (
            "Most of them are neither right nor wrong: use a reward that grades finer, or, where it leaves [0, 1], say "
            "what is right by `success_reward`, `reward_min` and `reward_max`."
        )
    return f"They lie on both sides: drop these problems ({PREFLIGHT}), or raise `num_generations` or `temperature`."


def all_correct(evidence: Evidence) -> str | None:
    """The share of all-correct groups rose beyond the limit."""
    rise = _describe_rise(evidence, "acr/all_correct", "all-correct")
    if rise is None:
        return None
    return f"{rise} The data are too easy for the policy by now: take harder problems ({PREFLIGHT}), or end the run."


def all_incorrect(evidence: Evidence) -> str | None:
    """The share of all-incorrect groups rose beyond the limit."""
    rise = _describe_rise(evidence, "acr/all_incorrect", "all-incorrect")
    if rise is None:
        return None
    first, last = evidence.first.mean("reward"), evidence.last.mean("reward")
    if last < first:
        return (
            f"{rise} The mean reward fell from {first:.2f} to {last:.2f}. Where the problems come in order of "
            "difficulty, shuffle them (`shuffle_dataset`) or take easier ones; otherwise the policy or the reward "
            "broke: go back to an earlier checkpoint with a lower `learning_rate` or a `beta` above 0."
        )
    return f"{rise} The later problems are too hard, or the reward misses right answers: {PREFLIGHT}."


def _describe_rise(evidence: Evidence, name: str, label: str) -> str | None:
    first, last, limits = evidence.first, evidence.last, evidence.limits
    before, after = first.mean(name), last.mean(name)
    is_risen = evidence.has_last and after - before >= limits.rise
    if not is_risen or rise_z(before, first.cases(name), after, last.cases(name)) < limits.z:
        return None
    if not last.exceeds(name, limits.collapse, limits.z):
        return None
    return f"The share of {label} groups rose from {before:.0%} ({first.span}) to {after:.0%} ({last.span})."


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
        f"{last.mean('acr/float_noise'):.0%} of the groups of {last.span} have equal rewards, yet advantages{size_text} "
        "that are rounding errors of their mean, and train on them. Use rewards that are exact in float32 (0 and 1, "
        'halves, quarters) or `scale_rewards="none"`, which does not divide the error by the eps 0.0001.'
    )


def unscorable(evidence: Evidence) -> str | None:
    """Groups with fewer than two rewards."""
    name, last, limits = "groups/frac_unscorable", evidence.last, evidence.limits
    if not last.exceeds(name, limits.unscorable, limits.z):
        return None
    return (
        f"{last.mean(name):.0%} of the groups of {last.span} have fewer than two completions with a reward, so there is "
        "nothing to compare, and no collapse rate counts them. Let the reward functions return a number (0 for an "
        "answer that cannot be read) where they return None now."
    )


def duplicates(evidence: Evidence) -> str | None:
    """Nearly all that could be copies are copies, and the groups collapse."""
    name, last, limits = "completions/frac_duplicates", evidence.last, evidence.limits
    possible = 1 - 1 / max(last.mean("num_generations"), 1.0)
    is_copied = last.exceeds(name, limits.duplicates * possible, limits.z)
    if not is_copied or not last.exceeds("acr/rate", limits.collapse, limits.z):
        return None
    return (
        f"{last.mean(name):.0%} of the completions of {last.span} repeat another of their group word for word "
        f"({possible:.0%} would be all but one), and {last.mean('acr/rate'):.0%} of the groups have equal rewards. Raise "
        "`temperature` (and `top_p` or `top_k`, where set); a larger `num_generations` would buy more copies."
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
    "one_group": Rule(one_group, ("acr/rate", "groups/num", "avspo/threshold")),
    "float_noise": Rule(float_noise, ("acr/rate", "acr/float_noise")),
    "unscorable": Rule(unscorable, ("acr/rate", "groups/frac_unscorable")),
    "duplicates": Rule(duplicates, ("acr/rate", "completions/frac_duplicates", "num_generations")),
    "entropy_collapse": Rule(entropy_collapse, ENTROPY),
    "entropy_explosion": Rule(entropy_explosion, ENTROPY),
}
"""Every rule by its name; the order is the order of speaking."""
