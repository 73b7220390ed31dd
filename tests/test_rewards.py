"""The boxed-answer reward."""

import threading

import pytest

from grpo_ext.rewards import boxed_accuracy, last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{3} and \\boxed{4", "3"),
        ("\\boxed{}", ""),
        ("42", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("\\boxed{42}", "42", 1.0),
        ("\\boxed{41}", "42", 0.0),
        ("42", "42", 0.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{ 7 }", "7", 1.0),
        ("\\boxed{7}", "We get \\boxed{7}.", 1.0),
        ("\\boxed{(1,2)}", "(1,3)", 0.0),
        ("\\boxed{}", "3", 0.0),
    ],
)
def test_boxed_accuracy(text, answer, expected):
    assert boxed_accuracy([text], answer=[answer]) == [expected]


def test_conversations():
    completion = [{"role": "assistant", "content": "\\boxed{5}"}]
    assert boxed_accuracy([completion, completion], answer=["5", "6"], level=[1, 2]) == [1.0, 0.0]


def test_an_unreadable_reference_is_unscorable():
    assert boxed_accuracy(["\\boxed{3}", "3", "\\boxed{}"], answer=["", "", ""]) == [None, None, None]


def test_it_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(boxed_accuracy(["\\boxed{0.5}"], answer=["\\frac{1}{2}"])))
    thread.start()
    thread.join()
    assert found == [1.0]
