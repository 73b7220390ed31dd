"""
The rules about collapse: evidence to sentences, or None. `rules.py` holds the others and the list of all.

Where most groups agree, the remedy depends on what they agree on, so it follows the cause of two thirds of them.
"""

from math import isnan

from grpo_ext.early_warning.evidence import Evidence
from grpo_ext.early_warning.tally import Tally, rise_z

PREFLIGHT = "`grpo-ext preflight` finds the problems that the model always or never solves"


def constant_reward(evidence: Evidence) -> str | None:
    """Every completion since the first batch got the same reward."""
    reward = evidence.constant_reward
    if not evidence.was_constant or reward is None:
        return None
    what = (
        f"The reward has been {reward:g} for every scored completion of the first {evidence.constant_batches} batches"
        f"{_count(evidence, evidence.constant_groups)}, so nothing tells a better completion from a worse one."
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


def _count(evidence: Evidence, groups: float) -> str:
    """The number of groups, where the run logged it."""
    return f" ({groups:.0f} groups)" if "groups/num" in evidence.seen else ""


def early_collapse(evidence: Evidence) -> str | None:
    """The collapse rate of the first batches lies above the limit."""
    return _describe_collapse(evidence, evidence.early)


def late_collapse(evidence: Evidence) -> str | None:
    """The collapse rate of the last window lies above the limit."""
    return _describe_collapse(evidence, evidence.last) if evidence.has_last else None


def _describe_collapse(evidence: Evidence, tally: Tally) -> str | None:
    limits = evidence.limits
    is_constant = evidence.is_constant and evidence.constant_reward is not None
    is_repaired = tally.mean("acr/after") <= limits.repaired * tally.mean("acr/rate")
    if is_constant or is_repaired or evidence.was_constant or not tally.exceeds("acr/rate", limits.collapse, limits.z):
        return None
    shares = [(tally.mean(f"acr/{cause}"), cause.replace("_", " ")) for cause in ("all_correct", "all_incorrect")]
    causes = ", ".join(f"{share:.0%} {cause}" for share, cause in shares if not isnan(share))
    what = (
        f"In {tally.mean('acr/rate'):.0%} of the groups of {tally.span}"
        f"{_count(evidence, tally.cases('acr/rate'))} all rewards are equal{f' ({causes})' if causes else ''}, and "
        "equal rewards teach nothing by themselves."
    )
    return " ".join([what, *_say_after(evidence, tally), _remedy(tally)])


def _say_after(evidence: Evidence, tally: Tally) -> list[str]:
    """How much of the collapse the method repairs, or which one would, where the numbers say so."""
    rate, after = tally.mean("acr/rate"), tally.mean("acr/after")
    if after < rate:
        return [f"After the method {after:.0%} are without an advantage."]
    if tally.mean("acr/all_incorrect") > rate / 3 and "avspo/threshold" not in evidence.seen:
        return ["`--method avspo` gives such groups an advantage."]
    return []


def _remedy(tally: Tally) -> str:
    """What to change about data, sampling or reward, by the cause of two thirds of the collapse."""
    most = 2 / 3 * tally.mean("acr/rate")
    if not tally.cases("acr/all_correct"):
        return (
            f"Whether they are all correct or all incorrect was not logged (the mean reward is "
            f"{tally.mean('reward'):.2f}); {PREFLIGHT}."
        )
    if tally.mean("acr/all_correct") >= most:
        return f"Most of them are all correct, so the data are too easy: take harder problems ({PREFLIGHT})."
    if tally.mean("acr/all_incorrect") >= most:
        return (
            "Most of them are all incorrect, so the data are too hard or the reward misses right answers: call the "
            f"reward function by hand on one, then take easier problems ({PREFLIGHT}) or a larger `num_generations`."
        )
    if tally.mean("acr/other") >= most:
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
