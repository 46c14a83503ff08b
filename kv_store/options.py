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
        None, "memory://, host://, file://: maximum number of bytes kept (default: 1 GiB in memory, no limit in files)"
    )
    segment: str | None = option(
        None, "host://: name of the launch's segments that may be written (default: any)", metavar="NAME"
    )
    connect_timeout_s: Seconds = option(2.0, "servers: deadline for connecting")
    operation_timeout_s: Seconds = option(
        10.0, "file://, servers: deadline of one call, whatever the size of its batch"
    )
    ttl_s: Annotated[float, Meta(gt=0, le=TTL_MAX_S)] | None = option(
        None, "redis://: a value's time to live, counted from its put (default: unlimited)"
    )
    max_bytes_in_flight: Size | None = option(
        None,
        "servers: maximum bytes requested but not yet read, over all calls, which a server must buffer (default: 8 "
        "MiB, 256 MiB for buckets)",
    )
    pipeline: Positive = option(64, "servers: maximum number of commands that one call sends ahead of their replies")
    endpoint: str | None = option(None, "s3://, az://: the server's URL (default: the provider's own)", metavar="URL")
    region: str | None = option(None, "s3://: the bucket's region (default: AWS_REGION)")
    metadata_server: str = option(
        "P2PHANDSHAKE",
        "mooncake://: the metadata service by which Mooncake's clients find one another, the same as for the clients "
        "that lend memory: P2PHANDSHAKE, http://host:port/metadata or another that Mooncake knows",
    )
    write: WritePolicy = option(
        "all",
        "which values tiers after the first one store; all: all that are written; second-use: values written or read "
        "again; evicted: values about to be evicted from host://",
    )
    retry_after_s: Seconds = option(1.0, "tiers: how long a failed tier is left alone")
    ssl_ca_certs: str | None = option(
        None,
        "rediss://: file with the CA certificates for the server's certificate (default: the system's)",
        metavar="FILE",
    )
    ssl_certfile: str | None = option(
        None, "rediss://: this client's certificate, if the server asks for one", metavar="FILE"
    )
    ssl_keyfile: str | None = option(None, "rediss://: private key of this client's certificate", metavar="FILE")
    ssl_cert_reqs: Literal["required", "optional", "none"] = option(
        "required", "rediss://: whether to verify the server's certificate; none: any server is accepted"
    )
    ssl_check_hostname: bool = option(True, "rediss://: whether the certificate must name the URL's host")
