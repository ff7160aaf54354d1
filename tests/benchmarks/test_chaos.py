"""`python -m benchmarks.chaos`: the schedule, what is read from a log, and three minutes of real faults, never
retried."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.chaos import networks as chaos_networks
from benchmarks.chaos import small_disks as chaos_disk
from benchmarks.chaos.__main__ import leaving_cleanly
from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES, ATTACKS
from benchmarks.chaos.attribution import BadMessage
from benchmarks.chaos.config import HUB, KINDS, ChaosConfig
from benchmarks.chaos.log import Begun, ChaosLog, Committed, Ended, Happened, Hashed, Healed, Struck, read_log
from benchmarks.chaos.outages import find_outages
from benchmarks.chaos.results import percentile
from benchmarks.chaos.schedule import MAX_AWAY, make_schedule
from benchmarks.chaos.verdict import Facts, judge
from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.events import Retried, Started, Step
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerAssignment, PeerJoined, RolledBack


def test_three_runs_of_half_an_hour_have_enough_of_everything():
    counts = Counter(fault.kind for seed in (1, 2, 3) for fault in make_schedule(ChaosConfig(seed=seed)))
    assert counts["kill"] >= 50
    assert counts["stop"] >= 20
    assert counts["cut"] >= 20
    assert counts["deaf"] + counts["mute"] >= 20
    assert counts["hub"] >= 20
    assert counts["store"] >= 10
    assert counts["poison"] >= 200
    assert set(counts) == {*KINDS, *ATTACK_NAMES}
    assert all(counts[name] >= 6 for name in ATTACK_NAMES)


@pytest.mark.parametrize("seed", range(50))
def test_a_seed_says_everything_and_leaves_enough_peers(seed):
    config = ChaosConfig(seed=seed)
    faults = make_schedule(config)
    assert faults == make_schedule(config)
    assert faults == sorted(faults)
    assert all(config.clean_seconds <= fault.at <= 60 * config.minutes for fault in faults)
    stops = [fault.seconds for fault in faults if fault.kind == "stop"]
    assert all(5 <= seconds <= 60 for seconds in stops)
    for fault in faults:
        away = {other.victim for other in faults if other.at <= fault.at <= other.until and other.kind in AWAY}
        assert len(away - {HUB}) <= MAX_AWAY
    assert faults != make_schedule(ChaosConfig(seed=seed + 1))


def test_short_runs_have_each_kind_once_and_those_without_networks_no_cuts():
    config = ChaosConfig(minutes=3, clean_seconds=20, without_cuts=True)
    kinds = {fault.kind for fault in make_schedule(config)}
    assert kinds == {*KINDS, *ATTACK_NAMES} - {"cut", "deaf", "mute"}


def test_attacks_change_no_fault_of_a_seed():
    without = make_schedule(ChaosConfig(seed=5, attacks=()))
    assert [fault for fault in make_schedule(ChaosConfig(seed=5)) if fault.kind not in ATTACKS] == without


@pytest.mark.parametrize(
    "wrong", [{"stages": 1}, {"minutes": 0.5}, {"faults": (), "attacks": ()}, {"faults": ("kill", "kill")}]
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(UserError):
        ChaosConfig(**wrong)


def test_a_failure_says_how_to_see_it_again():
    config = ChaosConfig(seed=3, clean_seconds=20, faults=("kill", "hub"), without_cuts=True)
    assert config.command == (
        "python -m benchmarks.chaos --seed 3 --minutes 30 --faults kill hub --without-cuts --clean-seconds 20"
    )


def step(moment, number):
    event = Step(time_s=moment, step=number, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, seconds=1, tokens_per_second=1)
    return Happened(time_s=moment, clock_s=moment, event=event)


def started(moment, number):
    return Happened(
        time_s=moment,
        clock_s=moment,
        event=Started(time_s=moment, step=number, config="", parameters=1, versions={}),
    )


def happened(moment, kind, **fields):
    return Happened(**at(moment), event=kind(time_s=moment, **fields))


def generation(moment, number, *names):
    peers = [PeerAssignment(name=name, segments=[index]) for index, name in enumerate(names)]
    return happened(moment, GenerationStarted, generation=number, step=0, peers=peers)


def ended(moment, number, reason):
    return happened(moment, GenerationEnded, generation=number, step=0, cause="failed", reason=reason)


def at(moment):
    return {"time_s": moment, "clock_s": moment}


AWAY = set(KINDS) - {"poison"}
FILES = {"first.safetensors": "a"}
LOG = [
    generation(0, 1, "p0", "p1"),
    started(0, 0),
    step(1, 1),
    Begun(**at(1), command="", seed=1),
    step(2, 2),
    Committed(**at(2.5), step=2, files=FILES),
    step(6, 3),
    Struck(**at(7), kind="kill", victim="p2", seconds=4),  # the standby: nothing happens
    step(8, 4),
    Struck(**at(9), kind="stop", victim="p1", seconds=8),
    step(9.1, 5),
    ended(12, 1, "p1 was lost (no heartbeat for 3 s)"),
    generation(12.5, 2, "p0", "p2"),
    started(14, 2),
    step(15, 3),
    Healed(**at(17), kind="stop", victim="p1"),
    step(18, 5),
    step(20, 6),
    ended(20.2, 2, "p0 stopped (no reason)"),
    started(21, 2),
    step(22, 3),
    Ended(**at(60)),
]


def test_outages_begin_with_the_fault_of_one_who_computed():
    first, second = find_outages(LOG)
    assert first.kinds == ("stop",)
    assert (first.noticed_after, first.executing_after, first.past_after) == (3, 6, 11)
    assert second.faults == ()
    assert second.why == "p0 stopped (no reason)"
    assert second.past_after is None


def test_the_victim_belonged_to_the_generation_that_ended_however_soon_the_next_begins():
    quick = [
        *LOG[:9],
        Struck(**at(8.01), kind="kill", victim="p1", seconds=4),
        ended(8.1, 1, "p1 was lost (its connection closed)"),
        generation(8.2, 2, "p0", "p2"),
        started(8.3, 2),
        step(8.4, 3),
    ]
    (outage,) = find_outages(quick)
    assert outage.kinds == ("kill",)
    assert outage.executing_after == pytest.approx(0.39)


def config_of(minutes=1.0):
    return ChaosConfig(minutes=minutes, clean_seconds=8, attacks=())


def test_a_run_is_judged_by_hashes_and_not_by_losses():
    steps = dict.fromkeys(range(1, 7), (1.0, 1.0))
    good = judge(config_of(), LOG, Facts(commits={2: FILES}, steps=steps))
    assert good.wrongs == []
    assert (good.commits, good.zombie_returns, good.faults) == (1, 1, {"kill": 1, "stop": 1})
    assert good.unexplained == ["p0 stopped (no reason); p1 had come back from stop"]
    assert (good.clean_steps_per_second, good.steps_per_second) == (0.5, pytest.approx(2 / 52))

    bad = judge(config_of(), LOG, Facts(commits={2: {"first.safetensors": "b"}}, steps=steps | {3: (1.0, 2.0)}))
    assert bad.commits_unequal == [2]
    assert bad.steps_unequal == [3, 3, 3]
    twice = [*LOG[:6], LOG[5], *LOG[6:]]
    assert judge(config_of(), twice, Facts(commits={2: FILES}, steps=steps)).commits_doubled == [2]
    later = [*LOG[:9], Committed(**at(8.5), step=4, files=FILES), *LOG[9:]]
    assert judge(config_of(), later, Facts(commits={2: FILES, 4: FILES}, steps=steps)).commits_lost == [4, 4]
    assert judge(config_of(), LOG[:-1], Facts(commits={2: FILES}, steps=steps)).wrongs == ["it has not ended"]


def test_a_commit_that_is_rolled_back_with_an_event_is_not_lost_but_counted():
    rolled_back = happened(8.7, RolledBack, step=2, lost_step=4, reason="the hub has lost blocks.3", folder="lost")
    log = [*LOG[:9], Committed(**at(8.5), step=4, files=FILES), rolled_back, *LOG[9:]]
    result = judge(config_of(), log, Facts(commits={2: FILES, 4: FILES}, steps={}))
    assert (result.commits_lost, result.commits_given_up) == ([], [format_event(rolled_back.event)])


def test_files_on_the_disk_are_compared_and_one_may_only_be_missing():
    files = {"first.safetensors": "a", "last.safetensors": "b"}
    facts = Facts(commits={2: files}, steps={})
    log = [*LOG[:5], Committed(**at(2.5), step=2, files=files), *LOG[6:-1]]
    ended = Ended(**at(60))
    missing = judge(config_of(), [*log, Hashed(**at(59), step=2, files=FILES), ended], facts)
    assert (missing.wrongs, missing.files_on_disk) == ([], 1)
    other = judge(config_of(), [*log, Hashed(**at(59), step=2, files={"first.safetensors": "c"}), ended], facts)
    assert other.files_unequal == ["2/first.safetensors"]
    assert len(other.wrongs) == 1


def test_a_standby_must_have_been_there_for_the_time_that_counts():
    (first, _) = find_outages(LOG)
    assert not first.standby_present, "p2 has not joined"
    there = [happened(0.1, PeerJoined, step=0, peer=name) for name in ("p0", "p1", "p2")]
    (first, _) = find_outages([LOG[0], *there, *LOG[1:]])
    assert first.standby_present
    result = judge(config_of(), [LOG[0], *there, *LOG[1:]], Facts(commits={2: FILES}, steps={}))
    assert (result.executing_with_standby, result.hits) == ([6.0], {"stop": 1})


def test_who_was_given_up_and_comes_back_is_timed():
    back = happened(19.5, PeerJoined, step=2, peer="p1")
    log = sorted([*LOG, back], key=lambda record: record.time_s)
    assert judge(config_of(), log, Facts(commits={2: FILES}, steps={})).rejoined_after == [2.5]


def blame(moment, sender, number):
    fields = {"culprit": "state over boundary 0", "boundary": 0, "forward": True, "reason": "is not finite"}
    return happened(moment, Retried, step=number, sender=sender, **fields)


def test_bad_messages_must_be_laid_at_the_right_door():
    facts = Facts(commits={2: FILES}, steps={}, poisoned=[BadMessage("p1", 3, 5.0)])
    assert judge(config_of(), LOG, facts).wrongs != []
    named = judge(config_of(), [*LOG[:6], blame(5.5, "p1", 3), *LOG[6:]], facts)
    assert (named.wrongs, named.poisoned_named) == ([], 1)
    other_blamed = [*LOG[:6], blame(5.5, "p0", 3), *LOG[6:]]
    other = judge(config_of(), other_blamed, facts)
    assert (other.false_alarms, other.poisoned_named, len(other.wrongs)) == (1, 0, 2)
    two = judge(config_of(), other_blamed, replace(facts, poisoned=[*facts.poisoned, BadMessage("p0", 3, 5.1)]))
    assert (two.poisoned_together, two.wrongs) == (1, [])
    late = replace(facts, poisoned=[BadMessage("p1", 6, 10.0)])  # the generation is over before step 6 comes
    assert (judge(config_of(), LOG, late).poisoned_overtaken, judge(config_of(), LOG, late).wrongs) == (1, [])


def test_the_log_is_read_back_also_after_a_crash(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"what": "fault", "time_')
    log = ChaosLog(path)
    for record in LOG:
        log.write(record)
    log.close()
    assert list(read_log(path)) == LOG


def test_a_bench_that_is_asked_to_end_puts_things_away_first():
    put_away = []

    def work():
        with leaving_cleanly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            finally:
                put_away.append(True)

    with pytest.raises(SystemExit):
        work()
    assert put_away == [True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_percentiles_of_few_values():
    assert percentile([3.0], 95) == 3.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([], 50) != percentile([], 50)


@pytest.mark.quiet
@pytest.mark.long
def test_three_minutes_of_chaos_and_not_a_bit_differs(tmp_path):
    pytest.importorskip("matplotlib")
    without = [] if chaos_networks.missing() is None else ["--without-cuts"]
    kinds = [kind for kind in KINDS if kind != "disk" or chaos_disk.missing() is None]
    command = [sys.executable, "-m", "benchmarks.chaos", "--output", str(tmp_path), "--seed", "7"]
    command += ["--minutes", "3", "--clean-seconds", "20", "--faults", *kinds, "--attacks", *without]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-5000:]
    (result,) = json.loads((tmp_path / "chaos.json").read_text())["seeds"]
    wanted = [kind for kind in kinds if not (without and kind in ("cut", "deaf", "mute"))]
    assert not result["shortfalls"]
    assert all(result["faults"][kind] >= 1 for kind in wanted), result["faults"]
    assert result["commits"] >= 3
    assert result["commits_unequal"] == result["commits_lost"] == result["commits_doubled"] == []
    assert result["steps_unequal"] == result["files_unequal"] == []
    assert result["files_on_disk"] > 0
    assert result["poisoned_named"] > 0
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, "it is done, and says so at once"
