"""A real S3 server on this machine for the tests: moto, over HTTP."""

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

import boto3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from moto.server import ThreadedMotoServer

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """These environment variables, and afterwards the old ones."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
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


def certificate(folder: Path) -> Path:
    """Key and certificate of 127.0.0.1, signed by itself, in one file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, names = datetime.datetime.now(datetime.UTC), [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "certificate.pem"
    file.write_bytes(private + made.public_bytes(pem))
    return file
