"""Options of stores, from a URL's query or a connector's configuration."""

from typing import Annotated, Literal

from msgspec import Meta

from pdkv.base.options import Options, Positive, Seconds, Size, option
from pdkv.kv_store.tier import WritePolicy

BYTES_IN_FLIGHT = 8 << 20
TTL_MAX_S = 1e9
"""A value's longest life, some 30 years."""


class StoreOptions(Options):
    """Options of all stores; each store reads its own, see registry.py."""

    capacity: Size | None = option(
        None, "memory://, host://, file://: most bytes kept (absent: 1 GiB in memory, no bound in files)"
    )
    segment: str | None = option(
        None, "host://: which of a launch's segments may be written: those of this name; absent: any", metavar="NAME"
    )
    connect_timeout_s: Seconds = option(2.0, "servers: deadline to connect")
    operation_timeout_s: Seconds = option(
        10.0, "file://, servers: deadline of one call, whatever the size of its batch"
    )
    ttl_s: Annotated[float, Meta(gt=0, le=TTL_MAX_S)] | None = option(
        None, "redis://: a value's life, from its put; absent: no end"
    )
    max_bytes_in_flight: Size | None = option(
        None,
        "servers: bytes requested and not yet read, over all calls: what a server must buffer (absent: 8 MiB, 256 MiB "
        "in buckets)",
    )
    pipeline: Positive = option(64, "servers: most commands of one call ahead of their replies")
    endpoint: str | None = option(None, "s3://, az://: the server's URL; absent: the provider's own", metavar="URL")
    region: str | None = option(None, "s3://: the bucket's region; absent: AWS_REGION")
    metadata_server: str = option(
        "P2PHANDSHAKE",
        "mooncake://: where its clients find each other, as the clients were told that lend memory: P2PHANDSHAKE, "
        "http://host:port/metadata or another that Mooncake knows",
    )
    write: WritePolicy = option(
        "all",
        "tiers behind the first: what they take: all that is written; second-use: what is read or written again; "
        "evicted: what is about to go from host://",
    )
    retry_after_s: Seconds = option(1.0, "tiers: how long a tier that failed is left alone")
    ssl_ca_certs: str | None = option(
        None, "rediss://: file of the certificates that sign the server's; absent: the system's", metavar="FILE"
    )
    ssl_certfile: str | None = option(
        None, "rediss://: this client's certificate, if the server asks for one", metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "rediss://: its private key", metavar="FILE")
    ssl_cert_reqs: Literal["required", "optional", "none"] = option(
        "required", "rediss://: the server's certificate; none: any server is accepted"
    )
    ssl_check_hostname: bool = option(True, "rediss://: the certificate must name the URL's host")
