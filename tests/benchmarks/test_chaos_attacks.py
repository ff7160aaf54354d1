"""The attacks of `python -m benchmarks.chaos`: the judge fails where one succeeds, where nobody is named for it and
where a run saw too little; and the hostile member does what it is told."""

import time
from dataclasses import replace

import msgspec
import pytest

from benchmarks.chaos import testbed
from benchmarks.chaos.attack_report import attack_table
from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES, ATTACKER, ATTACKS
from benchmarks.chaos.attacks.member import FUNCTIONS
from benchmarks.chaos.attacks.order import Deed, Order, give, read_deeds, taken, write_down
from benchmarks.chaos.config import HUB, ChaosConfig
from benchmarks.chaos.faults import UNDECIDED, carry_out
from benchmarks.chaos.log import Begun, Committed, Ended, Exited, Hashed, Healed, Named, Raised, Struck
from benchmarks.chaos.observer import RunObserver
from benchmarks.chaos.outages import find_outages
from benchmarks.chaos.report import page
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.verdict import Facts, judge
from tests.benchmarks.test_chaos import FILES, at, ended, generation, happened, started, step
from tests.programs import PATIENCE
from thinpipe.core.event_text import format_event
from thinpipe.core.events import Retried, Saved, Step
from thinpipe.core.hub_events import GenerationEnded, PeerJoined, PeerLeft

SECONDS, CLEAN, SPC = 60, 8, 2


def config_of(**fields):
    fields = {"minutes": 1.0, "clean_seconds": CLEAN, "steps_per_commit": SPC, "faults": ("kill",)} | fields
    return ChaosConfig(**{"attacks": ("nan_in_sum",)} | fields)


def a_run(*more, seconds=SECONDS, last=10**6, without=()):
    """A step a second and a commit every other, one peer killed and replaced, one attack that ends a generation."""
    log = [
        happened(0, PeerJoined, step=0, peer="p2"),
        generation(0, 1, "p0", "p1", ATTACKER),
        started(0, 0),
        Begun(**at(0.5), command="", seed=1),
        *(step(moment, moment) for moment in range(1, min(seconds, last))),
        *(Committed(**at(moment + 0.1), step=moment, files=FILES) for moment in range(SPC, min(seconds, last), SPC)),
        Struck(**at(20.2), kind="kill", victim="p1", seconds=2),
        Struck(**at(40.2), kind="nan_in_sum", victim=ATTACKER, seconds=0),
        retried(40.5, ATTACKER),
        Hashed(**at(seconds), step=SPC, files=FILES),
        Ended(**at(seconds)),
        *more,
    ]
    return sorted((r for r in log if r not in without), key=lambda record: record.time_s)


def retried(moment, sender, number=41):
    fields = {"culprit": "the sum", "boundary": 0, "forward": True, "reason": "is not finite"}
    return happened(moment, Retried, step=number, sender=sender, **fields)


def facts(deeds=("nan_in_sum",), problem=""):
    return Facts(
        commits=dict.fromkeys(range(SPC, SECONDS, SPC), FILES),
        steps=dict.fromkeys(range(1, SECONDS), (1.0, 1.0)),
        deeds=[Deed(time_s=41, attack=name, name=ATTACKER, detail="", problem=problem) for name in deeds],
    )


def left(moment, peer, cause, reason=""):
    return happened(moment, PeerLeft, step=1, peer=peer, cause=cause, reason=reason or f"{peer}: {cause}")


def test_a_run_in_which_all_is_answered_passes():
    result = judge(config_of(), a_run(), facts())
    assert result.failures == []
    (attack,) = result.attacks
    assert (attack.ordered, attack.carried_out, attack.computing, attack.named) == (1, 1, 1, 1)
    assert ATTACKER in attack.named_by


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ([Exited(**at(42), who=HUB, code=1, tail="")], "hub ended with 1"),
        ([Exited(**at(42), who="p0", code=2, tail="")], "p0 ended with 2"),
        ([left(42, "p0", "accused")], "p0 was removed"),
        ([left(42, "p0", "disconnected")], "p0 was lost"),
        ([ended(42, 1, "three steps in a row")], None),
        ([happened(42, GenerationEnded, generation=1, step=1, cause="not_finite", reason="x")], "the run was ended"),
        ([retried(42, "p0")], "false alarms"),
        ([Raised(**at(42), text="OverflowError: x")], "the hub raised OverflowError"),
    ],
)
def test_harm_to_the_run_or_to_others_is_a_failure(planted, words):
    result = judge(config_of(), a_run(*planted), facts())
    if words is None:
        assert result.wrongs == [], "a generation may end: that is seen as time in which nothing was computed"
    else:
        assert any(words in wrong for wrong in result.wrongs), result.wrongs
        assert words in page([result], "") or words == "false alarms"


def test_who_was_hit_by_a_fault_of_ours_is_lost_for_that_reason():
    cut = Struck(**at(41), kind="cut", victim="p0", seconds=10)
    assert judge(config_of(), a_run(cut, left(45, "p0", "no_heartbeat")), facts()).wrongs == []


def test_who_is_refused_again_and_again_is_harm_of_the_first_attack_alone():
    refused = [Exited(**at(moment), who="p0", code=2, tail="") for moment in (42, 44, 52)]
    more = [Struck(**at(50), kind="stall", victim=ATTACKER, seconds=0), retried(51, ATTACKER, 50)]
    result = judge(config_of(), a_run(*refused, *more), facts(("nan_in_sum", "stall")))
    assert {each.attack: each.harm for each in result.attacks} == {"nan_in_sum": ["p0 ended with 2"], "stall": []}
    removed = judge(config_of(), a_run(left(41, "p0", "accused"), *refused, *more), facts(("nan_in_sum", "stall")))
    assert [(each.attack, len(each.harm)) for each in removed.attacks] == [("nan_in_sum", 1), ("stall", 0)]


def test_the_removal_of_the_attacker_is_no_failure_and_is_counted():
    gone = [left(42, ATTACKER, "accused"), Exited(**at(42), who=ATTACKER, code=2, tail="")]
    result = judge(config_of(), a_run(*gone), facts())
    assert result.failures == []
    assert (result.attacks[0].struck_off, result.named_wrongly) == (1, 0)


def test_somebody_must_be_named_for_an_attack_that_asks_for_it():
    quiet = a_run(without=[retried(40.5, ATTACKER)])
    (failure,) = judge(config_of(), quiet, facts()).wrongs
    assert "nan_in_sum: 1 of 1 times nobody was named" in failure
    said = Named(**at(42), text=f"reduce: {ATTACKER} sends numbers that are not finite")
    assert judge(config_of(), [*quiet, said], facts()).wrongs == []
    events = [
        happened(41.9, PeerJoined, step=1, peer=ATTACKER),
        happened(41.9, Saved, step=40, path=f"/run/peers/{ATTACKER}/checkpoints", nbytes=1, seconds=1),
    ]
    benign = [*events, Named(**at(42), text=f"{ATTACKER} was admitted with an invite")]
    benign += [Named(**at(42), text=f"step: 40  {format_event(each.event)}") for each in events]
    assert judge(config_of(), sorted([*quiet, *benign], key=lambda r: r.time_s), facts()).wrongs != []
    other = a_run(retried(40.6, "p0"), without=[retried(40.5, ATTACKER)])
    result = judge(config_of(), other, facts())
    assert (result.false_alarms, result.named_wrongly, len(result.wrongs)) == (1, 1, 2)


def test_who_tells_of_a_lost_peer_is_not_blamed():
    told = happened(
        41,
        GenerationEnded,
        generation=1,
        step=1,
        cause="failed",
        peer=ATTACKER,
        reason=f"{ATTACKER} stopped (p1 is lost)",
    )
    quiet = a_run(told, without=[retried(40.5, ATTACKER)])
    assert judge(config_of(), quiet, facts()).wrongs == ["nan_in_sum: 1 of 1 times nobody was named"]


def test_an_attack_that_halts_the_run_is_a_failure():
    halted = [r for r in a_run(seconds=200) if not (40 < r.time_s < 110 and not isinstance(r, Struck))]
    log = sorted([*halted, retried(41, ATTACKER), started(110, 40)], key=lambda r: r.time_s)
    wrongs = judge(config_of(minutes=200 / 60), log, facts()).wrongs
    assert any("nothing was computed for 70 s" in wrong for wrong in wrongs), wrongs


def test_an_attack_without_effect_does_not_begin_the_outage_of_a_fault_that_follows():
    """Steps went on after it; one that comes after the last step belongs to the outage."""
    kill = Struck(**at(32.2), kind="kill", victim="p1", seconds=2)
    early, late = (Struck(**at(moment), kind="stall", victim=ATTACKER, seconds=0) for moment in (29.5, 32.5))
    quiet = [r for r in a_run(kill, started(37, 30)) if not (32.3 < r.time_s < 37)]
    for attack, kinds in ((early, ("kill",)), (late, ("kill", "stall"))):
        outages = find_outages(sorted([*quiet, attack], key=lambda r: r.time_s))
        assert [outage.kinds for outage in outages] == [kinds]


def test_a_changed_bit_is_a_failure():
    good = facts()
    other = {"first.safetensors": "another"}
    bad = judge(config_of(), a_run(), replace(good, commits=dict(good.commits) | {4: other}))
    assert any(wrong.startswith("1 commits differ") for wrong in bad.wrongs)


def test_two_commits_at_a_twentieth_of_the_clean_speed_are_a_failure():
    log = [r for r in a_run() if not (isinstance(r, Committed) and r.step > 4)]
    slow = [r for r in log if not (isinstance(getattr(r, "event", None), Step) and r.event.step > CLEAN + 3)]
    result = judge(config_of(), slow, facts())
    assert (result.wrongs, result.commits, round(result.throughput_kept, 2)) == ([], 2, 0.06)
    text = "; ".join(result.shortfalls)
    assert "6% of the clean speed was kept" in text
    assert "2 commits were compared, fewer than 8" in text
    assert "11 steps were compared, fewer than 15" in text
    assert "saw too little" in page([result], "")


def test_steps_that_an_attacker_invents_are_no_progress():
    """The hub has taken them: that is a failure, and the floors stay unmet."""
    log = [r for r in a_run() if not (isinstance(getattr(r, "event", None), Step) and r.event.step > CLEAN + 3)]
    for invented in (step(45.5, 1 << 53), step(45.5, 50)):
        event = msgspec.structs.replace(invented.event, loss=3.0)
        forged = msgspec.structs.replace(invented, event=event)
        result = judge(config_of(), sorted([*log, forged], key=lambda r: r.time_s), facts())
        assert (round(result.throughput_kept, 2), result.steps_unequal) == (0.06, [event.step])


def test_no_commit_and_no_step_at_all_are_a_failure():
    result = judge(config_of(), [Begun(**at(0), command="", seed=1), Ended(**at(60))], Facts(commits={}, steps={}))
    assert len(result.shortfalls) >= 5
    assert "too slow or too busy" in result.shortfalls[0]


def test_steps_that_nobody_compared_do_not_count():
    uncompared = replace(facts(), steps={})
    assert any("0 steps were compared" in text for text in judge(config_of(), a_run(), uncompared).shortfalls)


@pytest.mark.parametrize("deeds", [(), ("stall",)])
def test_what_did_not_happen_is_undecided_and_so_a_failure(deeds):
    assert judge(config_of(), a_run(), facts(deeds)).failures == ["not carried out: nan_in_sum"]
    failed = facts(problem="no place in a generation")
    result = judge(config_of(), a_run(), failed)
    assert result.failures == ["not carried out: nan_in_sum"]
    assert "no place in a generation" in attack_table([result])
    more = config_of(faults=("kill", "stop", "poison"))
    texts = judge(more, a_run(), facts()).failures
    assert texts == [
        "nothing of these kinds happened: stop, poison",
        "of 0 bad messages only 0 came to be judged",
    ]


def test_a_second_hub_that_nobody_saw_refused_is_undecided_and_so_a_failure():
    second = Struck(**at(30), kind="second_hub", victim=HUB, seconds=1)
    config = config_of(faults=("kill", "second_hub"))
    for detail, failures in (("refused: in use", 0), (UNDECIDED, 1), ("it was not: hub of run run", 1)):
        log = a_run(second, Healed(**at(31), kind="second_hub", victim=HUB, detail=detail))
        assert len(judge(config, log, facts()).failures) == failures


def test_the_catalogue_is_carried_out_by_a_function_each_and_reported_in_words():
    assert tuple(FUNCTIONS) == tuple(ATTACKS) == ATTACK_NAMES
    assert attack_table([judge(config_of(attacks=()), a_run(), facts())]).count("nan_in_sum") == 2
    assert attack_table([]) == "There was no hostile member."


def test_orders_and_deeds_come_back_as_they_were_written(tmp_path):
    order = Order(attack="stall", seconds=30.0, invite="thinpipe3:x")
    give(tmp_path / "order", order)
    assert taken(tmp_path / "order") == order
    write_down(tmp_path / "deeds", "stall", ATTACKER, "x" * 1000, "")
    with (tmp_path / "deeds").open("ab") as file:
        file.write(b'{"time_s": 1')
    (deed,) = read_deeds(tmp_path / "deeds")
    assert (deed.attack, deed.name, len(deed.detail)) == ("stall", ATTACKER, 300)


def test_a_traceback_of_the_hub_is_seen(tmp_path):
    config = ChaosConfig(output=tmp_path, without_cuts=True)
    bed, seen = testbed.Testbed(config), []
    bed.printed(HUB).parent.mkdir(parents=True)
    observer = RunObserver(bed, seen.append, lambda: 0.0, {})
    lines = ("Traceback (most recent call last):", '  File "x", line 1, in f', "    return 1", "OverflowError: y")
    bed.printed(HUB).write_text("\n".join(("loss", *lines, f"{ATTACKER} sends too much", "loss", "")))
    observer.poll()
    assert [type(record) for record in seen] == [Raised, Named]
    assert seen[0].text == "OverflowError: y"


@pytest.mark.programs
@pytest.mark.long
def test_the_hostile_member_does_what_it_is_told(tmp_path):
    """A hub, two honest peers and the hostile member as real programs: it takes part, attacks, starts itself again and
    repeats what it has said, and gets a new name when its key opens nothing any more."""
    config = ChaosConfig(
        output=tmp_path, stages=2, standbys=0, faults=("kill",), without_cuts=True, heartbeat_timeout_seconds=120
    )
    with testbed.Testbed(config) as bed:
        bed.start()
        until(lambda: b'"event":"step"' in events_of(bed), bed)
        for name in ("headers_member", "admin_requests", "old_incarnation"):
            until(lambda: not config.attack_order.exists(), bed)
            carry_out(bed, Fault(0, name, ATTACKER, 0))
            until(lambda name=name: name in {deed.attack for deed in read_deeds(config.attack_deeds)}, bed)
        assert [deed.problem for deed in read_deeds(config.attack_deeds)] == [""] * 3
        assert events_of(bed).count(b'"peer":"mallory"') >= 2, "it has started itself again"
        bed.programs[ATTACKER].kill()
        bed.strike_off(ATTACKER)
        bed.start_attacker()
        until(lambda: b'"peer":"mallory1"' in events_of(bed), bed)


def events_of(bed):
    path = bed.dump_folder / "events.jsonl"
    return path.read_bytes() if path.exists() else b""


def until(reached, bed):
    deadline = time.monotonic() + PATIENCE
    while not reached():
        printed = {name: program.tail for name, program in bed.programs.items()}
        assert bed.programs[HUB].running, printed
        assert time.monotonic() < deadline, printed
        time.sleep(0.1)
