"""One table: estimator | rewards | advantages, by hand."""

from math import exp, nan, sqrt

import pytest
from _asserts import assert_matches
from _rewards import groups

from grpo_ext.advantages import (
    AGRAE,
    AVSPO,
    GRPO,
    HADW,
    MCGRPO,
    AVSPOPrototype,
    ConstantRewards,
    EasyFocused,
    FixedAnchor,
    FixedCount,
    HardFocused,
    MeanControl,
    NegativeDominant,
    PositiveDominant,
)
from grpo_ext.statistics import EPS

# One right answer of four: mean 1/4, sum of squares (3/4)^2 + 3 (1/4)^2 = 3/4. Three of four: the mirror image.
ONE, THREE = [1, 0, 0, 0], [1, 1, 1, 0]
STD = sqrt(0.75 / 3)  # 1/2, the sample standard deviation of both
RIGHT, WRONG = 0.75 / (STD + EPS), -0.25 / (STD + EPS)  # of ONE; THREE has -WRONG and -RIGHT

# The two together: 8 rewards, mean 1/2, sum of squares 8/4 = 2, batch accuracy 1/2.
BATCH_STD = sqrt(2 / 7)

# ONE scaled without eps by its population std, sqrt((3/4) / 4) = sqrt(3)/4.
PURE_RIGHT, PURE_WRONG = 0.75 / (sqrt(3) / 4), -0.25 / (sqrt(3) / 4)

# Four equal rewards and one virtual reward at distance h of them: the mean moves by h/5, the sum of squares is
# 4 (h/5)^2 + (4h/5)^2 = 4h^2/5, so the sample std is h / sqrt(5).
ONE_VIRTUAL = 1 / 5 / (1 / sqrt(5) + EPS)  # h = 1
ONE_HALF_VIRTUAL = 0.1 / (0.5 / sqrt(5) + EPS)  # h = 1/2

# Two wrong answers and K = 2 virtual rewards 0.1, 0.05: mean 0.0375; squares: 2 0.0375^2 + 0.0625^2 + 0.0125^2.
WRONG_PAIR = -0.0375 / (sqrt(0.006875 / 3) + EPS)
# Two right ones and 2/3, 1/3: mean 3/4; squares: 2 (1/4)^2 + (1/12)^2 + (5/12)^2 = 1/8 + 26/144 = 11/36.
RIGHT_PAIR = 0.25 / (sqrt(11 / 36 / 3) + EPS)

# Five different rewards: median 0.4; distances 0.3, 0.5, 0, 0.3, 0.1, their median 0.3.
SPREAD = [0.1, 0.9, 0.4, 0.7, 0.3]
# Two right of five: median 0, MAD 0, so the std divides: mean 2/5, squares 2 (3/5)^2 + 3 (2/5)^2 = 6/5.
TWO, TWO_STD = [1, 0, 0, 1, 0], sqrt(1.2 / 4)
# One right of three: mean 1/3, squares (2/3)^2 + 2 (1/3)^2 = 2/3, sample std sqrt(1/3).
THIRD_STD = sqrt(1 / 3)

TABLE = [
    (GRPO(), [ONE], [[RIGHT, WRONG, WRONG, WRONG]]),
    (GRPO(std_ddof=0, advantage_eps=0.0), [ONE], [[PURE_RIGHT, PURE_WRONG, PURE_WRONG, PURE_WRONG]]),
    (GRPO(scale_rewards="none"), [ONE], [[0.75, -0.25, -0.25, -0.25]]),
    (
        GRPO(scale_rewards="batch"),
        [ONE, THREE],
        [
            [0.75 / (BATCH_STD + EPS), *[-0.25 / (BATCH_STD + EPS)] * 3],
            [*[0.25 / (BATCH_STD + EPS)] * 3, -0.75 / (BATCH_STD + EPS)],
        ],
    ),
    # An unscorable row takes no part in mean and std; a lone row has no contrast.
    (
        GRPO(),
        [[1, nan, 0, 0], [nan, nan, 1, nan]],
        [[2 / 3 / (THIRD_STD + EPS), nan, *[-1 / 3 / (THIRD_STD + EPS)] * 2], [nan, nan, 0, nan]],
    ),
    # Success rates 1/4 and 3/4 against the first batch's own accuracy 1/2: d = -1/4 and +1/4.
    (
        HADW(),
        [ONE, THREE],
        [
            [RIGHT * 1.3 * exp(0.25), *[WRONG * 1.3 * exp(-0.25)] * 3],
            [*[-WRONG * 1.3 * exp(-0.25)] * 3, -RIGHT * 1.3 * exp(0.25)],
        ],
    ),
    # Against 0.4 a rate of 1/4 is hard by 0.15.
    (
        HADW(base=GRPO(scale_rewards="none"), reweight_scale=2.0, anchor=FixedAnchor(0.4)),
        [ONE],
        [[1.5 * exp(0.15), *[-0.5 * exp(-0.15)] * 3]],
    ),
    # omega = 1/2; W = (1/2)(1/2) / sqrt(1/4) + (1/2)(1/2) / sqrt(3/4) for both; positive advantages are halved.
    (
        AGRAE(),
        [ONE, THREE],
        [
            [RIGHT * (0.5 + 0.5 / sqrt(3)) / 2, *[WRONG * (0.5 + 0.5 / sqrt(3))] * 3],
            [*[-WRONG * (0.5 + 0.5 / sqrt(3)) / 2] * 3, -RIGHT * (0.5 + 0.5 / sqrt(3))],
        ],
    ),
    # omega = 1/4 = p: W = (1/8) / (1/2) + (3/8) / sqrt(3/4) = 1/4 + sqrt(3)/4; alpha = 1/2 halves.
    (
        AGRAE(attenuation_threshold=0.5),
        [ONE],
        [[RIGHT * (1 + sqrt(3)) / 8, *[WRONG * (1 + sqrt(3)) / 4] * 3]],
    ),
    (PositiveDominant(), [ONE], [[10 * RIGHT, WRONG, WRONG, WRONG]]),
    (NegativeDominant(), [ONE], [[RIGHT / 10, WRONG, WRONG, WRONG]]),
    # 0.5 / sqrt(1/4) = 1 and 0.5 / sqrt(3/4) = 1 / sqrt(3).
    (HardFocused(), [ONE], [[RIGHT, WRONG, WRONG, WRONG]]),
    (EasyFocused(), [ONE], [[RIGHT / sqrt(3), *[WRONG / sqrt(3)] * 3]]),
    # Half of the groups collapsed does not exceed 1/2; two of three do: K = ceil(2 sqrt(2/3)) = 2.
    (AVSPO(), [[0, 0], [1, 0]], [[0, 0], [0.5 / (sqrt(0.5) + EPS), -0.5 / (sqrt(0.5) + EPS)]]),
    (
        AVSPO(),
        [[0, 0], [1, 1], [1, 0]],
        [[WRONG_PAIR] * 2, [RIGHT_PAIR] * 2, [0.5 / (sqrt(0.5) + EPS), -0.5 / (sqrt(0.5) + EPS)]],
    ),
    (
        AVSPO(virtual_strategy=ConstantRewards(), virtual_count_rule=FixedCount(1)),
        [[0] * 4, [1] * 4],
        [[-ONE_HALF_VIRTUAL] * 4, [ONE_HALF_VIRTUAL] * 4],
    ),
    (AVSPOPrototype(), [[0] * 4, [0] * 4], [[-ONE_VIRTUAL] * 4, [-ONE_VIRTUAL] * 4]),
    (AVSPOPrototype(), [[1] * 4], [[ONE_VIRTUAL] * 4]),
    (AVSPOPrototype(), [[0] * 4, [1] * 4, ONE], [[0] * 4, [0] * 4, [RIGHT, WRONG, WRONG, WRONG]]),
    (MCGRPO(), [TWO], [[1 / (TWO_STD + EPS), 0, 0, 1 / (TWO_STD + EPS), 0]]),
    (MCGRPO(), [SPREAD], [[-0.3 / 0.301, 0.5 / 0.301, 0, 0.3 / 0.301, -0.1 / 0.301]]),
    # Four scored rows 1, 0, 0, 1: the lower median is 0, and so is the MAD; mean 1/2, squares 1, std sqrt(1/3).
    (MCGRPO(), [[1, nan, 0, 0, 1]], [[1 / (THIRD_STD + EPS), nan, 0, 0, 1 / (THIRD_STD + EPS)]]),
    (MCGRPO(center_scale="none"), [SPREAD], [[-0.3, 0.5, 0, 0.3, -0.1]]),
    (MCGRPO(mad_fallback="epsilon"), [[0, 2, 0]], [[0, 2000, 0]]),
    # Two of five advantages are not 0.
    (MCGRPO(mad_fallback="none", compensate_zero_advantages=True), [TWO], [[2.5, 0, 0, 2.5, 0]]),
    (MeanControl(), [ONE], [[RIGHT, WRONG, WRONG, WRONG]]),
]


@pytest.mark.parametrize(("estimator", "rewards", "expected"), TABLE, ids=lambda value: type(value).__name__)
def test_advantages_equal_hand_arithmetic(estimator, rewards, expected):
    assert_matches(estimator.estimate(groups(rewards)), expected)
