"""The broker's self-signed TLS certificate, created once in its folder and identified by its fingerprint.

There is no certificate authority and no expiry: an invite carries the fingerprint, and peers check only that (pinning).
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically

_NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280's date for "no end"


@dataclass(frozen=True)
class Certificate:
    """Paths of a certificate and its private key, and its fingerprint."""

    path: Path
    key_path: Path
    fingerprint: str


def fingerprint(der: bytes) -> str:
    """SHA-256 of a DER-encoded certificate, in hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def load_or_create_certificate(folder: Path) -> Certificate:
    """The certificate of this folder, created now if there is none. Raises UserError if it is damaged or its key is
    missing.

    The key is written before the certificate, so that a crash cannot leave a certificate without its key.
    """
    path, key_path = folder / "hub.crt", folder / "hub.key"
    if not path.exists():
        certificate, key = _self_signed()
        write_atomically(key_path, key, mode=0o600)
        write_atomically(path, certificate)
    elif not key_path.exists():
        raise UserError(
            f"{key_path}, the private key of {path}, is missing: restore it from a backup, or delete the certificate "
            "too and send new invites to all peers"
        )
    return Certificate(path, key_path, fingerprint(_der(path)))


def _self_signed() -> tuple[bytes, bytes]:
    """A certificate and its private key, both PEM. P-256, because every TLS library since TLS 1.2 supports it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hub")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))  # clocks of home machines may be wrong
        .not_valid_after(_NEVER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hub")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _der(path: Path) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
    except ValueError:
        raise UserError(
            f"{path} is damaged: restore it from a backup, or delete it and send new invites to all peers, because a "
            "new certificate has another fingerprint"
        ) from None
