import os
import ssl
import stat

import pytest

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.certificate import fingerprint, load_or_create_certificate


def test_it_is_made_once(tmp_path):
    made = load_or_create_certificate(tmp_path)
    assert load_or_create_certificate(tmp_path) == made
    assert made.fingerprint == fingerprint(ssl.PEM_cert_to_DER_cert(made.path.read_text()))


def test_only_its_owner_reads_the_key(tmp_path):
    previous = os.umask(0)
    try:
        made = load_or_create_certificate(tmp_path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(made.key_path.stat().st_mode) == 0o600


def test_key_and_certificate_belong_together(tmp_path):
    made = load_or_create_certificate(tmp_path)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.path, made.key_path)


def test_a_crash_after_the_key_leaves_nothing_to_repair(tmp_path):
    load_or_create_certificate(tmp_path).path.unlink()
    made = load_or_create_certificate(tmp_path)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(made.path, made.key_path)


def test_a_missing_key_is_not_replaced_in_silence(tmp_path):
    load_or_create_certificate(tmp_path).key_path.unlink()
    with pytest.raises(UserError, match=r"hub\.key, .* is missing.*new invites"):
        load_or_create_certificate(tmp_path)


def test_a_damaged_certificate_is_named(tmp_path):
    load_or_create_certificate(tmp_path).path.write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    with pytest.raises(UserError, match=r"hub\.crt is damaged"):
        load_or_create_certificate(tmp_path)
