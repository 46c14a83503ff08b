"""From when until when a certificate holds, read from its file: Python's ssl does not tell about one's own."""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_END = "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class Dates(NamedTuple):
    """Of one certificate."""

    begins: datetime
    ends: datetime


def certificate_dates(path: Path) -> Dates:
    """Of the first certificate in a PEM file, which is the server's own; those of its authorities follow it.

    RFC 5280, 4.1: Certificate { tbsCertificate { [version], serialNumber, signature, issuer, validity { notBefore,
    notAfter }, … }, … }.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    text = path.read_text("latin-1")
    begin = text.find("-----BEGIN CERTIFICATE-----")
    end = text.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError(f"{path} holds no PEM certificate")
    data = ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)])
    _, certificate, _ = _element(data)
    _, rest, _ = _element(certificate)
    if rest[:1] == bytes([_VERSION]):
        rest = _element(rest)[2]
    for _ in ("serialNumber", "signature", "issuer"):
        rest = _element(rest)[2]
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError(f"{path} holds a certificate without a validity")
    tag, begins, rest = _element(validity)
    return Dates(_time(tag, begins), _time(*_element(rest)[:2]))


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first DER element, and what follows it."""
    if len(data) < 2:
        raise ValueError("a certificate ends early")
    size, at = data[1], 2
    if size & 0x80:
        at += size & 0x7F
        size = int.from_bytes(data[2:at])
    if at + size > len(data):
        raise ValueError("a certificate ends early")
    return data[0], data[at : at + size], data[at + size :]


def _time(tag: int, text: bytes) -> datetime:
    """UTCTime has two digits of the year, for 1950 to 2049; GeneralizedTime has four."""
    digits = text.decode("latin-1")
    if tag == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"a certificate's time has the tag {tag}")
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
