"""The HTTP server's certificate: checked before anything starts, and read again at run time."""

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from pdkv.base.log_limit import LogLimit
from pdkv.config import TlsConfig
from pdkv.errors import ConfigError

_MAX_FILE_BYTES = 4 << 20
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

logger = logging.getLogger(__name__)


class Tls:
    """The server's certificate and the requirements for clients', as last read from the files."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files. Raises ConfigError if a server cannot use them."""
        self._config = config
        self._failures = LogLimit()
        self.context = load_context(config)  # of future handshakes

    def reload(self) -> None:
        """Read the files again. If they are invalid, the error is logged and the previous certificate stays.

        Open connections are not affected.
        """
        try:
            self.context = load_context(self._config)
        except ConfigError as error:
            logger.error("keeping the previous certificate: %s", error)
            return
        logger.info("the certificate of %s is in force", self._config.ssl_certfile)

    def failed(self, client: object, error: OSError) -> None:
        """Log a failed handshake. A client that only connects, such as a port scanner, is not worth a line."""
        if isinstance(error, ssl.SSLError) and self._failures.passes():
            logger.info("TLS handshake with %s failed: %s", client, error)


def load_context(config: TlsConfig) -> ssl.SSLContext:
    """A server's TLS context made from the files: TLS 1.2 or later.

    Raises:
        ConfigError: a file that cannot be read, holds something else, or does not belong to the others; the message
            names it, its option and what was expected.
    """
    certificate, key, authorities = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    assert certificate is not None
    _check_pem("--ssl-certfile", certificate, b"CERTIFICATE-----", "a certificate")
    _check_pem("--ssl-keyfile", key or certificate, b"PRIVATE KEY-----", "a private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])

    def refuse_password() -> NoReturn:
        raise ConfigError(
            f"--ssl-keyfile: the private key in {key or certificate} is encrypted, and there is no way to enter its "
            "password: give an unencrypted one (`openssl pkey`), readable only by you"
        )

    try:
        context.load_cert_chain(certificate, key, password=refuse_password)
    except OSError as error:
        files = f"{certificate} and {key}" if key is not None else f"{certificate}"
        if _reason(error) == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"--ssl-certfile: the certificate and the private key in {files} do not match") from None
        raise ConfigError(f"--ssl-certfile: {files} cannot be used: {_reason(error)}") from None
    if authorities is not None:
        _check_pem("--ssl-ca-certs", authorities, b"CERTIFICATE-----", "a certificate")
        try:
            context.load_verify_locations(authorities)
        except OSError as error:
            raise ConfigError(f"--ssl-ca-certs: {authorities} cannot be used: {_reason(error)}") from None
    context.verify_mode = _VERIFY[config.client_certificates]
    return context


def _reason(error: OSError) -> str:
    """OpenSSL's description of the error, or the system's if a file has just disappeared."""
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)


def _check_pem(flag: str, path: Path, sign: bytes, what: str) -> None:
    """Raise ConfigError if `path` cannot be read or lacks `sign`: OpenSSL does not say which file its errors
    are about.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error.strerror}") from None
    if sign not in data:
        raise ConfigError(f"{flag}: {path} contains no PEM block of {what}")
