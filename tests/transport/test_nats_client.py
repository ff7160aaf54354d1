"""Dialling what is not our hub: nothing is sent, nothing hangs, and the words say what to do."""

import asyncio
import ssl

import pytest

from tests.swarm.brokers import Faults, running_broker
from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.certificate import load_or_create_certificate
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats import client as client_module
from thinpipe.transport.nats.client import Credentials, connect

CREDENTIALS = Credentials(seed=KeyPair.new().seed, jwt="e30.e30.e30")
SOME_FINGERPRINT = "0" * 64


async def refusal(url, fingerprint=SOME_FINGERPRINT, credentials=CREDENTIALS):
    faults = Faults()
    with pytest.raises(UserError) as caught:
        await connect(url, fingerprint, credentials, inbox="_INBOX.p0", on_down=faults)
    assert not faults
    return str(caught.value)


class Impostor:
    """Listens where the hub should; keeps every byte it is sent."""

    def __init__(self, greeting=b"", certificate=None):
        self.received = b""
        self._greeting, self._context = greeting, None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate.path, certificate.key_path)

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.url = f"tls://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        try:
            writer.write(self._greeting)
            while data := await reader.read(4096):
                self.received += data
        except OSError:
            pass
        finally:
            writer.close()


INFO = b'INFO {"server_id":"X","version":"2.15.1","nonce":"abc","auth_required":true,"max_payload":1000}\r\n'


def test_another_certificate_is_refused_before_anything_is_sent(tmp_path):
    async def check():
        async with Impostor(INFO, load_or_create_certificate(tmp_path)) as impostor:
            words = await refusal(impostor.url)
            await asyncio.sleep(0.1)
            assert impostor.received == b""
        assert "not the hub that invited you" in words
        assert "new invite" in words

    asyncio.run(check())


def test_the_right_hub_with_a_wrong_fingerprint_is_refused(tmp_path):
    with running_broker(tmp_path) as running:
        words = asyncio.run(refusal(running.url, credentials=running.credentials["p0"]))
    assert "not the hub that invited you" in words


def test_a_server_without_tls_is_told_nothing(monkeypatch):
    monkeypatch.setattr(client_module, "_STEP_SECONDS", 0.3)

    async def check():
        async with Impostor(INFO) as impostor:
            assert "hub" in await refusal(impostor.url)
            assert b"CONNECT" not in impostor.received

    asyncio.run(check())


def test_nobody_there():
    async def check():
        async with Impostor() as impostor:
            url = impostor.url
        words = await refusal(url)
        assert "no hub to reach" in words
        assert "its port is open" in words

    asyncio.run(check())


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_silent_server_holds_nobody_up(tmp_path, monkeypatch, encrypted):
    monkeypatch.setattr(client_module, "_STEP_SECONDS", 0.3)
    certificate = load_or_create_certificate(tmp_path)

    async def check():
        async with Impostor(b"", certificate if encrypted else None) as impostor:
            assert "no answer in time" in await refusal(impostor.url, certificate.fingerprint)

    asyncio.run(check())


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"INFO {\r\n", b"x" * 200_000, INFO + b"-ERR 'no'\r\n"]
)
def test_a_server_that_talks_nonsense_is_told_from_a_hub(tmp_path, monkeypatch, greeting):
    monkeypatch.setattr(client_module, "_STEP_SECONDS", 0.5)
    certificate = load_or_create_certificate(tmp_path)

    async def check():
        async with Impostor(greeting, certificate) as impostor:
            assert "hub" in await refusal(impostor.url, certificate.fingerprint)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"url": "nats://127.0.0.1:4222"}, "looks like tls://"),
        ({"url": "tls://127.0.0.1"}, "looks like tls://"),
        ({"url": "tls://127.0.0.1:99999"}, "looks like tls://"),
        ({"url": "tls://[::1:4222"}, "looks like tls://"),
        ({"fingerprint": "abc"}, "copy the invite whole"),
        ({"fingerprint": "A" * 64}, "copy the invite whole"),
        ({"credentials": Credentials(seed="SUABC", jwt="")}, "our key is damaged"),
        ({"credentials": Credentials(seed="ü", jwt="")}, "our key is damaged"),
    ],
)
def test_a_damaged_invite_is_noticed_before_dialling(changes, words):
    asked = {"url": "tls://127.0.0.1:1"} | changes
    assert words in asyncio.run(refusal(**asked))
