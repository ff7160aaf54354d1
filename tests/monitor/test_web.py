"""The page, served by the real server and read as a browser reads it."""

import json
import re
import socket
import threading
from contextlib import ExitStack

import httpx
import pytest

from tests.monitor.sample_events import peers, started, step
from thinpipe.core.errors import UserError
from thinpipe.core.events import EventLog
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.monitor.log_follower import LogFollower
from thinpipe.monitor.web import Page
from thinpipe.monitor.web_server import serve_until_stopped, serving

pytestmark = pytest.mark.timeout(200)
PATIENCE = httpx.Timeout(120.0)


def data_of(lines):
    return (json.loads(line.removeprefix("data: "))["snapshot"] for line in lines if line.startswith("data: "))


def test_a_browser_is_told_of_every_change(tmp_path):
    with serving(tmp_path) as address, httpx.Client(base_url=address, timeout=PATIENCE) as client:
        with client.stream("GET", "/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            pictures = data_of(stream.iter_lines())
            assert next(pictures)["state"] == "waiting", "the log is not there yet"
            with EventLog(tmp_path / "events.jsonl") as log:
                log.write(GenerationStarted(generation=1, step=0, peers=peers("anna", "<b>bert</b>")))
                log.write(started())
                log.write(step(1))
                snapshot = next(snapshot for snapshot in pictures if snapshot["step"] == 1)
                assert [stage["name"] for stage in snapshot["stages"]] == ["anna", "<b>bert</b>"]
                log.write(step(2))
                assert next(snapshot for snapshot in pictures if snapshot["step"] == 2)["loss"] == 4.98
        assert client.get("/snapshot.json").json()["snapshot"]["step"] == 2, "who comes later sees the same"


def test_the_page_loads_nothing_from_elsewhere_and_writes_text_only(tmp_path):
    with serving(tmp_path) as address:
        answer = httpx.get(address, timeout=PATIENCE)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.findall(r"https?://[^\"]+", answer.text) == ["http://www.w3.org/2000/svg"], "a name, not an address"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|style=|onclick=", answer.text)


def test_another_sites_name_for_this_machine_is_refused(tmp_path):
    with serving(tmp_path) as address:
        assert httpx.get(address, headers={"Host": "evil.example"}, timeout=PATIENCE).status_code == 400
        assert httpx.get(address, headers={"Host": "localhost:1"}, timeout=PATIENCE).status_code == 200


def test_served_to_all_it_is_read_by_addresses_and_names_of_this_machine_alone(tmp_path):
    own = ["192.0.2.7:80", "[2001:db8::1]:8080", "[::1]", "LOCALHOST", f"{socket.gethostname()}:8080"]
    others = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "[evil.example]", ""]
    with serving(tmp_path, host="0.0.0.0") as address:
        url = address.replace("0.0.0.0", "127.0.0.1")
        for codes, hosts in ((200, own), (400, others)):
            found = {host: httpx.get(url, headers={"Host": host}, timeout=PATIENCE).status_code for host in hosts}
            assert found == dict.fromkeys(hosts, codes)


def test_a_look_that_goes_wrong_is_said_once_and_the_next_may_go_well(tmp_path, capsys):
    log = tmp_path / "events.jsonl"
    log.mkdir()  # opening it fails
    page = Page(LogFollower(tmp_path))
    assert [page._read(), page._read()] == [False, False]
    assert capsys.readouterr().err.count("the web page cannot read the event log") == 1
    log.rmdir()
    with EventLog(log) as written:
        written.write(step(1))
    assert page._read()


def test_a_server_that_ends_by_itself_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("uvicorn.Server.run", lambda *_: None)
    assert serve_until_stopped(tmp_path, "127.0.0.1", 0) == 1
    assert "the web page of" in capsys.readouterr().out


def test_the_page_ends_while_somebody_looks(tmp_path):
    threads = set(threading.enumerate())
    with ExitStack() as looking:
        with serving(tmp_path) as address:
            stream = looking.enter_context(httpx.stream("GET", f"{address}events", timeout=PATIENCE))
            next(data_of(stream.iter_lines()))
        ended = set(threading.enumerate())
    assert not [thread for thread in ended - threads if thread.name == "thinpipe-page"]


def test_a_port_that_is_taken_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"{port}.*choose another port"), serving(tmp_path, port=port):
            pass
