"""Texts of a member that would be markup or commands to a terminal: whoever reads them sees them as they are."""

import msgspec

from tests.programs import run_to_end
from tests.swarm.hostile.adversary import Adversary
from tests.swarm.hubs import ask_next, report, running_hub

MARKUP = "[/x][bold red]a card[/]"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\r\n"


def test_status_shows_names_of_devices_as_plain_text(start_hub, run_config, tmp_path):
    _hub, invites = start_hub(2)
    with Adversary(invites[0], tmp_path) as mallory:
        honest = report()
        processor = msgspec.structs.replace(honest.processor, device=f"{MARKUP}{ESCAPES}", device_class=ESCAPES)
        mallory.next(report=msgspec.structs.replace(honest, processor=processor))
        code, printed = run_to_end("status", run_config.job.dump_folder)
    assert code == 0, printed
    assert all(letter.isprintable() or letter == "\n" for letter in printed), repr(printed)
    cells = [line.split("│")[3].strip() for line in printed.splitlines() if line.count("│") > 3]
    assert MARKUP.replace(" ", "") in "".join(cells).replace(" ", ""), printed


def test_an_error_of_a_member_reaches_the_owner_as_plain_text(run_config):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as hostile:
        assert ask_next(hostile, running).generation == 1
        assert ask_next(hostile, running, left_generation=1, error=f"{MARKUP}{ESCAPES}").generation == 2
        (line,) = [line for line in running.printed if MARKUP in line]
        assert line.isprintable()
