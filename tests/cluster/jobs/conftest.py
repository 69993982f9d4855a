"""Fixtures: one head for all tests of jobs, and an object store."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
from head import BUCKET, Head
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    one = Head()
    yield one
    one.close()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "somebody")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        try:
            _, port = server.get_host_and_port()
            boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1").create_bucket(
                Bucket=BUCKET
            )
            yield f"s3://{BUCKET}/folder/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        finally:
            server.stop()
