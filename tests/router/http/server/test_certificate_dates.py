"""Until when a certificate holds: as openssl reads it, and what is said of it at start and on a renewal."""

import contextlib
import logging
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tls import Certificates, make_certificates

from pdkv.config import TlsConfig
from pdkv.router.http.server.certificates import Dates, Tls, certificate_dates, date_problem


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def by_openssl(path: Path) -> Dates:
    command = ["openssl", "x509", "-in", str(path), "-noout", "-startdate", "-enddate"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    times = [datetime.strptime(line.partition("=")[2], "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC) for line in lines]
    return Dates(*times)


def test_dates_are_those_that_openssl_reads(files: Certificates, tmp_path: Path) -> None:
    """The second one ends behind 2049, where dates are written in another form; a chain's first one counts."""
    assert certificate_dates(files.certificate) == by_openssl(files.certificate)
    late = make_certificates(tmp_path, "late", days=20_000)
    assert certificate_dates(late.certificate) == by_openssl(late.certificate)
    assert certificate_dates(late.certificate).ends.year > 2050
    chain = tmp_path / "chain.pem"
    chain.write_bytes(late.key.read_bytes() + files.certificate.read_bytes() + late.authority.read_bytes())
    assert certificate_dates(chain) == by_openssl(files.certificate)


def test_what_is_damaged_is_an_error_and_no_other(files: Certificates, tmp_path: Path) -> None:
    text = files.certificate.read_text()
    lines = text.splitlines(keepends=True)
    broken = tmp_path / "broken.pem"
    for number in range(1, len(lines) - 1):
        broken.write_text("".join([*lines[:number], lines[-1]]))
        with contextlib.suppress(OSError):
            certificate_dates(broken)
    broken.write_text("no certificate")
    assert "cannot be read" in date_problem(broken, datetime.now(UTC))


def test_what_clients_refuse_now_or_soon_is_said(files: Certificates) -> None:
    path = files.certificate
    begins, ends = certificate_dates(path)
    day = timedelta(days=1)
    assert date_problem(path, begins) == date_problem(path, ends - 15 * day) == ""
    assert "is valid only from" in date_problem(path, begins - day)
    assert f"expires on {ends}" in date_problem(path, ends - 13 * day)
    assert f"expired on {ends}" in date_problem(path, ends)


def test_a_certificate_that_expires_soon_is_warned_of_at_start_and_on_a_renewal(
    files: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    Tls(TlsConfig(ssl_certfile=files.certificate, ssl_keyfile=files.key)).reload()
    assert not caplog.records
    soon = make_certificates(tmp_path, days=2)
    tls = Tls(TlsConfig(ssl_certfile=soon.certificate, ssl_keyfile=soon.key))
    tls.reload()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert f"the certificate of {soon.certificate} expires on" in caplog.text
