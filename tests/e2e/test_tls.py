"""A launch that speaks HTTPS, to clients with a certificate only: operators' commands work, and SIGHUP renews it."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
import warm
from deployments import Launch
from tls import Certificates, client_context, make_certificates


def test_https_with_client_certificates_beside_operators_and_a_renewal(launch: Launch, tmp_path: Path) -> None:
    old, new = (make_certificates(tmp_path, name) for name in ("old", "new"))
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(files: Certificates) -> None:
        shutil.copy(files.certificate, certificate)
        shutil.copy(files.key, key)

    install(old)
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certs", str(old.authority)]
    deployment = launch("--prefill", "0", "--decode", "1", *flags)
    assert deployment.url.startswith("https://127.0.0.1:")

    def complete(trusted: Certificates, own: Certificates | None) -> httpx.Response:
        body = {"model": "served", "prompt": [2, 3, 4], "max_tokens": 2}
        with httpx.Client(verify=client_context(trusted, own), timeout=60) as client:
            return client.post(deployment.url + "/v1/completions", json=body)

    def pd(*arguments: str) -> str:
        done = warm.run([*warm.COMMAND, *arguments], env={**os.environ, "TMPDIR": str(deployment.directory)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert complete(old, old).status_code == 200
    for stranger in (None, new):
        with pytest.raises(httpx.TransportError):
            complete(old, stranger)
    with pytest.raises(httpx.TransportError):
        httpx.get(deployment.url.replace("https", "http") + "/health", timeout=60)
    assert pd("scale", "--decode", "2") == "there are 2 aggregated\n"
    assert "engine-1" in pd("engines", "--run", deployment.url)
    assert pd("restart") == "2 engines were restarted\n"

    install(new)
    deployment.process.send_signal(signal.SIGHUP)
    deployment.wait_for_line("the certificate of .*cert.pem is in force")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        complete(old, old)
    assert complete(new, old).status_code == 200
    assert deployment.stop() == 0
