"""What the hostile member says by hand, to the hub and to other peers. Each function carries out an attack of the
catalogue and returns what there is to say of it."""

import contextlib
import random
import threading
import time
from typing import Any

import msgspec

from benchmarks.chaos.attacks.insider import ANSWER_SECONDS, Insider
from benchmarks.chaos.attacks.order import Order
from tests.swarm.commits import announcement
from tests.swarm.hostile.adversary import MALFORMED_HEADERS, Adversary, Stranger
from thinpipe.checkpoint import Manifest
from thinpipe.core.events import Step, Stopped
from thinpipe.core.numerics import numerics
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import (
    Accusation,
    AdminRequest,
    CheckpointAnnouncement,
    EventReport,
    LeaveRequest,
    NextRequest,
    ReadyRequest,
    TokensRequest,
)
from thinpipe.swarm.protocol.reduction import ReduceRequest
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.store_messages import StoreRequest

WORDS = b"\x1b[31mthe hub's owner removed this machine from the run: ask for a new invite to join again"
SERVICES = (
    *("heartbeat", "next", "ready", "leave", "tokens", "checkpoint", "event", "status", "admin", "store", "reduce"),
    *("read_file", "write_file", "probe"),
)
_ABSURD_STEP: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens": 1, "tokens_per_second": 1.0}


def afterwards(me: Adversary) -> str:
    """Whether the hub answers still."""
    try:
        me.ask("status", b"", ANSWER_SECONDS)
    except (ConnectionError, TimeoutError) as error:
        return f"then no answer: {error}"
    return "then the hub answered"


def headers_member(insider: Insider, _order: Order) -> str:
    with insider.by_hand() as me:
        for header in MALFORMED_HEADERS.values():
            for service in ("heartbeat", "next"):
                me.send_raw(f"hub.{me.name}.{service}", header)
        return f"{2 * len(MALFORMED_HEADERS)} messages; {afterwards(me)}"


def headers_invite(insider: Insider, order: Order) -> str:
    invite = Invite.read(order.invite)
    with insider.by_hand() as me, Stranger(invite) as stranger:
        for header in MALFORMED_HEADERS.values():
            stranger.send_raw(f"join.{invite.id}", header)
        return f"{len(MALFORMED_HEADERS)} messages; {afterwards(me)}"


def headers_peer(insider: Insider, _order: Order) -> str:
    others = insider.others
    with insider.by_hand() as me:
        for other in others:
            for header in MALFORMED_HEADERS.values():
                for kind in ("note", "credit", "data"):
                    me.send_raw(f"m.{other}.{me.name}.{kind}", header)
        return f"to {', '.join(others)}; {afterwards(me)}"


def words_of_hub(insider: Insider, _order: Order) -> str:
    others = insider.others
    with insider.by_hand() as me:
        for other in others:
            me.tell(other, "note", WORDS)
        said = f"to {', '.join(others)}; {afterwards(me)}"
    for subject in (*(f"m.{other}.hub.note" for other in others), "bcast.stop", "bcast.lost"):
        with insider.by_hand() as me:  # one each: the server refuses it, and the client then hangs up
            me.send_raw(subject, b"NATS/1.0\r\n\r\n", WORDS)
            said += f"; {subject}: {afterwards(me)}"
    return said


def malformed_messages(insider: Insider, _order: Order) -> str:
    """To each service: noise, and each valid message with a missing end, with another type and with extreme numbers."""
    draw = random.Random("thinpipe chaos malformed")
    messages: list[Any] = [
        *(NextRequest(incarnation=insider.process.incarnation, numerics=numerics()), LeaveRequest(incarnation="x")),
        *(ReadyRequest(generation=1, hashes={"a": "b"}), TokensRequest(split="train", index=0)),
        *(
            CheckpointAnnouncement(
                generation=1, step=1, samples_seen=1, basis_version=None, basis_sha256=None, files=[]
            ),
            EventReport(generation=1, event=b"{}"),
        ),
        *(ReduceRequest(generation=1, round_number=1, op="sum", values=bytes(8)), StoreRequest(what="get", keys=["x"])),
        *(Heartbeat(generation=1), AdminRequest(what="stop")),
    ]
    sent = 0
    with insider.by_hand() as me:
        for service in SERVICES:
            for message in messages:
                for data in _spoilt(msgspec.msgpack.encode(message), draw):
                    me.say(service, data)
                    sent += 1
        return f"{sent} messages to {len(SERVICES)} services; {afterwards(me)}"


def _spoilt(data: bytes, draw: random.Random) -> list[bytes]:
    numbers = msgspec.msgpack.decode(data)
    extreme: list[Any] = [1e308, -1, 1 << 63, None, [[]], "\x1b]0;x\x07", b"\xff"]
    fields: list[Any] = list(numbers) if isinstance(numbers, dict) else [*range(len(numbers))]
    spoilt = [data[: draw.randrange(len(data))], draw.randbytes(40), data + b"\0"]
    for field in (field for field in fields if field != "incarnation"):  # another one would be a new start of its own
        changed = dict(numbers) if isinstance(numbers, dict) else list(numbers)
        changed[field] = draw.choice(extreme)
        spoilt.append(msgspec.msgpack.encode(changed))
    return spoilt


def absurd_report(insider: Insider, order: Order) -> str:
    """Stays with these figures for a while, in which generations may begin, and then tells its usual ones, if the hub
    has not sent it away by then."""
    assignment, usual = insider.wait_for_place(), insider.process.report
    insider.claim(flops=1e308, up_bps=1e-30, down_bps=1e-30, latency_s=1.7e308)
    insider.leave_generation()

    def tell_usual() -> None:
        insider.process.report = usual
        with contextlib.suppress(OSError):
            insider.leave_generation()

    later = threading.Timer(order.seconds, tell_usual)
    later.daemon = True
    later.start()
    return f"left generation {assignment.generation} with these figures"


def absurd_event(insider: Insider, _order: Order) -> str:
    assignment = insider.become_first()
    numbers = [
        {"seconds": 1e308},
        {"seconds": 5e-324},
        {"loss": -1e6},
        {"grad_norm": 1e308},
        {"tokens_per_second": 5e-324},
    ]
    with insider.by_hand() as me:
        me.generation = assignment.generation
        for fields in numbers:
            me.report_event(Step(**{"step": 1, "seconds": 1.0} | _ABSURD_STEP | fields))
        me.report_event(Step(step=1 << 53, seconds=1.0, **_ABSURD_STEP))
        return f"{len(numbers) + 1} events {_as_place(insider, assignment)}; {afterwards(me)}"


def _as_place(insider: Insider, assignment: Any) -> str:
    return f"as number {1 + assignment.names.index(insider.name)} of {len(assignment.names)}"


def admin_requests(insider: Insider, _order: Order) -> str:
    others = insider.others
    wanted = [AdminRequest(what="stop"), AdminRequest(what="invite")]
    wanted += [AdminRequest(what="kick", name=name) for name in (*others, "hub", "")]
    with insider.by_hand() as me:
        for request in wanted:
            me.say("admin", request)
        said = f"{len(wanted)} commands; {afterwards(me)}"
        me.send_raw("hub.hub.admin", b"NATS/1.0\r\n\r\n", msgspec.msgpack.encode(wanted[0]))
        return said


def false_accusation(insider: Insider, _order: Order) -> str:
    assignment = insider.wait_for_place()
    victims = [name for name in assignment.names if name != insider.name]
    step = int(insider.status().progress.get("step", 1))
    for number, victim in enumerate(victims):
        accusation = Accusation(
            name=victim, step=max(1, step - 10 * number), what="state over boundary 0 is not finite"
        )
        insider.leave_generation(accusation=accusation, error=f"{victim} sent bad values twice in step {step}")
    return f"accused {', '.join(victims)} at step {step}"


def end_of_run(insider: Insider, _order: Order) -> str:
    usual = insider.process.report
    assignment = insider.become_first()
    with insider.by_hand() as me:
        me.generation = assignment.generation
        me.report_event(Stopped(step=int(insider.status().progress.get("step", 1)), reason="not_finite"))
    insider.process.report = usual
    insider.leave_generation(stop_reason="not_finite")
    return _as_place(insider, assignment)


def leaving_again(insider: Insider, order: Order) -> str:
    left, generation, deadline = 0, 0, time.monotonic() + order.seconds
    while left < 5 and time.monotonic() < deadline:
        try:
            generation = insider.wait_for_place(after=generation).generation
        except TimeoutError:
            if not left:
                raise
            break
        insider.leave_generation()
        left += 1
    return f"ended {left} generations"


def phantom_checkpoint(insider: Insider, _order: Order) -> str:
    assignment = insider.wait_for_place()
    manifest = msgspec.json.decode(assignment.manifest, type=Manifest)
    phantom = msgspec.structs.replace(manifest, step=999_999).with_checksum()
    with insider.by_hand() as me:
        address, files = insider.process.identity.address, sorted(phantom.files)
        data = announcement(address, phantom, files, generation=assignment.generation)
        answer = me.ask("checkpoint", data, ANSWER_SECONDS)
    return f"the hub said {msgspec.msgpack.decode(answer)}"


def spoilt_rendezvous(insider: Insider, order: Order) -> str:
    """From the end of a generation on, in which the others meet for the next one."""
    assignment = insider.wait_for_place()
    run, size = insider.process.identity.fingerprint[:16], len(assignment.names)
    keys = [f"{run}/{assignment.generation + later}/there/{rank}" for later in (1, 2) for rank in range(size)]
    insider.leave_generation()
    deadline, sent = time.monotonic() + order.seconds, 0
    with insider.by_hand() as me:
        while time.monotonic() < deadline:
            for key in keys:
                me.say("store", StoreRequest(what="delete", keys=[key]))
            for _ in range(300):
                me.say("store", StoreRequest(what="set", keys=[f"x{sent}"], value=b"x"))
                sent += 1
            time.sleep(0.1)
        return f"deleted {len(keys)} keys again and again, set {sent}; {afterwards(me)}"
