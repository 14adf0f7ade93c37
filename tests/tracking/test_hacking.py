"""The monitor of hacking on the curves of Cooper's figures, and through a checkpoint."""

import json

from spark_megatron.tracking.hacking import HackingMonitor

STATIC = [(0.35, 0.560), (0.45, 0.570), (0.55, 0.583), (0.70, 0.567), (0.93, 0.555), (1.0, 0.50)]
"""(mean reward in training, held-out accuracy) every 20 steps with a reward model that stays as it is."""
UPDATED = [(0.36, 0.558), (0.42, 0.565), (0.48, 0.57), (0.52, 0.575), (0.55, 0.572), (0.57, 0.5805)]


def alarms(monitor: HackingMonitor, curve: list[tuple[float, float]]) -> list[float]:
    found = []
    for reward, accuracy in curve:
        monitor.observe(reward - 0.01)
        monitor.observe(reward + 0.01)
        found.append(monitor.evaluated(accuracy)["hacking/alarm"])
    return found


def test_a_static_reward_model_is_hacked_and_an_updated_one_is_not() -> None:
    assert alarms(HackingMonitor(rise=0.1, drop=0.02), STATIC) == [0, 0, 0, 0, 1, 1]
    assert not any(alarms(HackingMonitor(rise=0.1, drop=0.02), UPDATED))


def test_both_must_move_and_by_as_much_as_is_set() -> None:
    """A falling accuracy alone is not hacking, nor is a rising reward; the settings are the bounds."""
    assert not any(alarms(HackingMonitor(rise=0.1, drop=0.02), [(0.5, 0.6), (0.5, 0.4)]))
    assert not any(alarms(HackingMonitor(rise=0.1, drop=0.02), [(0.5, 0.6), (0.9, 0.6)]))
    assert alarms(HackingMonitor(rise=0.3, drop=0.1), [(0.5, 0.6), (0.75, 0.4), (0.9, 0.55), (0.9, 0.45)]) == [
        0,
        0,
        0,
        1,
    ]
    assert alarms(HackingMonitor(rise=0.0, drop=0.0), [(0.5, 0.6), (0.5, 0.6)]) == [0, 0]


def test_what_it_measures() -> None:
    monitor = HackingMonitor(rise=0.1, drop=0.02)
    assert monitor.evaluated(0.5) == {}
    alarms(monitor, [(0.5, 0.75), (0.25, 0.5)])
    monitor.observe(0.75)
    assert monitor.evaluated(0.625) == {"hacking/reward_rise": 0.25, "hacking/accuracy_drop": 0.125, "hacking/alarm": 1}


def test_it_goes_on_after_a_checkpoint() -> None:
    whole, first, second = (HackingMonitor(rise=0.1, drop=0.02) for _ in range(3))
    expected = alarms(whole, STATIC)
    begun = alarms(first, STATIC[:4])
    first.observe(0.92)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.observe(0.94)
    assert [*begun, second.evaluated(STATIC[4][1])["hacking/alarm"], *alarms(second, STATIC[5:])] == expected
