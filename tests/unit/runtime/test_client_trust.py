"""The authority and the name by which a client can trust a certificate."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton.runtime.network.client_trust import ClientTrust, client_trust
from baton.runtime.network.tls_files import CertificatePair
from tests.certificates import Authority


def self_signed(directory: Path) -> CertificatePair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pair = CertificatePair(certificate=directory / "self.pem", key=directory / "self.key")
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pair


def test_certificate_without_an_authority_is_trusted_by_itself(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    assert client_trust(pair, [pair.certificate], "127.0.0.1") == ClientTrust(ca=pair.certificate)


def test_first_authority_that_verifies_is_chosen_with_the_name_to_ask_for(tmp_path: Path) -> None:
    authority, other = Authority.new(tmp_path / "a"), Authority.new(tmp_path / "b")
    pair = authority.pair("front", "baton.example")
    files = [pair.certificate, other.file, authority.file]
    assert client_trust(pair, files, "127.0.0.1") == ClientTrust(ca=authority.file, name="baton.example")
    assert client_trust(pair, files, "baton.example") == ClientTrust(ca=authority.file)


def test_unknown_authority_is_reported_as_none(tmp_path: Path) -> None:
    pair = Authority.new(tmp_path / "a").pair("front", "baton.example")
    assert client_trust(pair, [tmp_path / "missing.pem"], "h") == ClientTrust(ca=None)
