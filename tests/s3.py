"""A real S3 server on this machine for the tests: moto, over HTTP."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import boto3
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def environment(**values: str) -> AbstractContextManager:
    return mock.patch.dict(os.environ, values)


@contextmanager
def s3_server(*buckets: str) -> Iterator[str]:
    """The endpoint of an S3 that holds these empty buckets; boto3 finds it through the environment meanwhile."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        with environment(**SETTINGS, AWS_ENDPOINT_URL=endpoint):
            for bucket in buckets:
                boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
            yield endpoint
    finally:
        server.stop()
