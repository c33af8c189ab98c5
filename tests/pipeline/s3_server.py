"""A real S3 server on this machine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "tables"


@contextlib.contextmanager
def served() -> Iterator[dict[str, str]]:
    """Run the server with an empty bucket. Yields the variables for its clients."""
    import boto3  # type: ignore[import-untyped]  # noqa: PLC0415  # slow to import
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=BUCKET)
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        **{name.upper(): value for name, value in keys.items()},
    }
    try:
        yield variables
    finally:
        server.stop()
