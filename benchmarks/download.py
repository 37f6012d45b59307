"""Measure the cost of downloading: CPU-ms per image, memory, and the delay that hanging and dripping servers cause.

    python -m benchmarks.download [--images 4000 --rounds 3 --rows 5000 --json FILE]

A server in a separate process responds on loopback addresses, each of which is a host to the downloader. There are
four cases: good images only (500 x 375 pixels, about 50 kB, all different); a list in which some rows name servers
that never respond or that send one byte at a time; rows of a single host that takes 0.1 s per request and never
responds to one in fifty; and 5,114 rows of a single host, of which 4,020 are good, and the others hang or are refused
with 404, 429 or 503. The code of `vlbert collect` downloads, checks, hashes and commits the images to a local
folder in another process. CPU time (with child processes) and memory of that process are measured, not the server's.
"""

import argparse
import asyncio
import multiprocessing
import random
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.measure import describe_machine, make_parser, write_json
from storage.collect.download import DownloadSettings
from storage.collect.plan import CollectSettings
from storage.collect.run import collect

IN_FLIGHT = 64
GOOD_HOSTS = [f"127.0.0.{number}" for number in range(2, 52)]
HANGING_HOSTS = [f"127.0.1.{number}" for number in range(1, 41)]
DRIPPING_HOSTS = [f"127.0.2.{number}" for number in range(1, 11)]
ONE_HOST, ONE_HOST_SECONDS, ONE_HOST_HANGS = "127.0.4.1", 0.1, 50  # one in ONE_HOST_HANGS requests hangs
MIXED_HOST = "127.0.4.2"
MIXED = Counter({b"200 OK": 4020, b"": 50, b"404 Not Found": 400, b"429 Too Many": 322, b"503 Unavailable": 322})
MIXED_STATUSES = {"ok": 4020, "timeout": 50, "http_404": 400, "http_429": 322, "http_503": 322}
HOSTS = (*GOOD_HOSTS, *HANGING_HOSTS, *DRIPPING_HOSTS, ONE_HOST, MIXED_HOST)
ROBOTS_TXT = b"User-agent: *\nDisallow: /wp-admin/\nAllow: /wp-admin/admin-ajax.php\nDisallow: /*?s=\n"
DRIP_SECONDS = 0.2  # time between two bytes
BARS = {"CPU-ms an image": 3.0, "peak RSS, MB": 600.0, "seconds": 60.0}


class Server:
    """Context manager: run the loopback server in a separate process."""

    def __enter__(self) -> "Server":
        context = multiprocessing.get_context("spawn")
        parent_end, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end,), daemon=True)
        self._process.start()
        if not parent_end.poll(120):
            raise TimeoutError("the server did not start within 120 s")
        self.port, self.image_bytes = parent_end.recv()
        self._pipe = parent_end
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts of the server as `host:port`, for an allow-list."""
        return tuple(f"{host}:{self.port}" for host in HOSTS)


def _serve(pipe: Connection) -> None:
    # The usual limit on open files is too low for the connections of a few thousand rows.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    from benchmarks.synthetic import make_jpeg  # here, so that the measured process does not import torch

    images = [make_jpeg(500, 375, number) for number in range(24)]
    mean = statistics.mean(map(len, images))
    mixed = list(MIXED.elements())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = writer.get_extra_info("sockname")[0]
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                if host in HANGING_HOSTS:
                    await asyncio.sleep(3600)
                path = request.split(b" ", 2)[1]
                if path == b"/robots.txt":
                    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ROBOTS_TXT)
                    writer.write(head + ROBOTS_TXT)
                    await writer.drain()
                    continue
                number = int(path.lstrip(b"/").partition(b".")[0])
                if host == ONE_HOST:
                    await asyncio.sleep(ONE_HOST_SECONDS if number % ONE_HOST_HANGS else 3600)
                if host == MIXED_HOST and mixed[number] != b"200 OK":
                    await asyncio.sleep(0 if mixed[number] else 3600)
                    writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n" % mixed[number])
                    await writer.drain()
                    continue
                image = images[number % len(images)]
                # A JPEG comment after the start marker makes every image different.
                image = image[:2] + b"\xff\xfe\x00\x0a%08d" % number + image[2:]
                head = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(image)
                if host in DRIPPING_HOSTS:
                    writer.write(head)
                    for byte in image:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(DRIP_SECONDS)
                writer.write(head + image)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        with socket.socket() as probe:
            probe.bind((GOOD_HOSTS[0], 0))
            port = probe.getsockname()[1]
        for host in HOSTS:
            await asyncio.start_server(answer, host, port, backlog=512)
        pipe.send((port, mean))
        await asyncio.get_running_loop().run_in_executor(None, pipe.poll, None)  # until the benchmark ends

    asyncio.run(serve())


def make_rows(
    server: Server, images: int, bad_hosts: Sequence[str] = (), bad: int = 0, hosts: Sequence[str] = GOOD_HOSTS
) -> list[str]:
    """Make a shuffled caption list with `images` rows for `hosts`, and `bad` rows for each of `bad_hosts`."""
    lines = [
        f"image {number}\thttp://{hosts[number % len(hosts)]}:{server.port}/{number}.jpg" for number in range(images)
    ]
    lines += [
        f"bad {host} {number}\thttp://{host}:{server.port}/{number}.jpg" for host in bad_hosts for number in range(bad)
    ]
    random.Random(0).shuffle(lines)
    return lines


def measure_collection(server: Server, lines: Sequence[str], settings: DownloadSettings) -> dict:
    """Collect the list in a new process. Return seconds, CPU-seconds, peak RSS in MB, and the rows by status."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="download-") as folder:
        captions = Path(folder, "list.tsv")
        captions.write_text("".join(f"{line}\n" for line in lines))
        process = context.Process(target=_collect, args=(child_end, folder, str(captions), settings))
        process.start()
        child_end.close()
        try:
            return parent_end.recv()
        except EOFError:
            raise RuntimeError("the collecting process ended early; see its error above") from None
        finally:
            process.join()


def _collect(pipe: Connection, folder: str, captions: str, settings: DownloadSettings) -> None:
    dataset = CollectSettings("captions", captions=captions, download=settings)
    before, start = _cpu_seconds(), time.perf_counter()
    collected = collect(str(Path(folder, "root")), dataset, lambda line: None)
    facts = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": _cpu_seconds() - before,
        "cpu_seconds_of_imports": before,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "statuses": collected.counts,
    }
    pipe.send(facts)


def _cpu_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in times)


def check(title: str, value: float, bar: str) -> bool:
    """Print a value next to BARS[bar], its maximum, and return True if it passes."""
    passed = value <= BARS[bar]
    print(f"{title:<58}{value:>10.2f}{BARS[bar]:>8.0f}  {'pass' if passed else 'FAIL'}", flush=True)
    return passed


def run(options: argparse.Namespace) -> int:
    """Measure all cases, print the report, and return the exit status."""
    report: dict[str, Any] = {"images": options.images, "in_flight": IN_FLIGHT, "bars": BARS}
    passed = []
    with Server() as server:
        report["image_bytes"] = server.image_bytes
        settings = DownloadSettings(allowed_hosts=server.hosts, concurrency=IN_FLIGHT)
        print(f"{options.images} images of {server.image_bytes / 1000:.1f} kB on average, {IN_FLIGHT} in flight\n")
        print(f"{'':<58}{'measured':>10}{'bar':>8}")
        report["good"] = []
        for number in range(options.rounds):
            facts = measure_collection(server, make_rows(server, options.images), settings)
            report["good"].append(facts)
            if facts["statuses"] != {"ok": options.images}:
                raise RuntimeError(f"not all images were stored: {facts['statuses']}")
            rate = options.images / facts["seconds"]
            cost = 1000 * facts["cpu_seconds"] / options.images
            passed.append(check(f"round {number + 1}: CPU-ms per image ({rate:.0f} images/s)", cost, "CPU-ms an image"))
            passed.append(check(f"round {number + 1}: peak RSS, MB", facts["peak_rss_mb"], "peak RSS, MB"))
        report["hostile"] = {}
        slow = (*HANGING_HOSTS, *DRIPPING_HOSTS)
        case = f"{options.rows} rows, {len(HANGING_HOSTS)} hanging and {len(DRIPPING_HOSTS)} dripping servers"
        cases = {f"{case}, {bad} each": make_rows(server, options.rows - bad * len(slow), slow, bad) for bad in (1, 20)}
        case = f"{options.rows} rows of one host, which takes {ONE_HOST_SECONDS} s or, one in {ONE_HOST_HANGS}, hangs"
        cases[case] = make_rows(server, options.rows, hosts=[ONE_HOST])
        refusing = f"{MIXED.total()} rows of one host, {MIXED[b'']} of which hang, and 1,044 of which are refused"
        cases[refusing] = make_rows(server, MIXED.total(), hosts=[MIXED_HOST])
        for case, lines in cases.items() if options.rows else ():
            # With default settings, except for the allowed hosts.
            facts = measure_collection(server, lines, DownloadSettings(allowed_hosts=server.hosts))
            report["hostile"][case] = facts
            passed.append(check(case, facts["seconds"], "seconds"))
            print(f"    {', '.join(f'{count} {status}' for status, count in facts['statuses'].items())}")
            if case == refusing and facts["statuses"] != MIXED_STATUSES:
                raise RuntimeError(f"not each row of {case} has its status: {facts['statuses']}")
            passed.append(check("    peak RSS, MB", facts["peak_rss_mb"], "peak RSS, MB"))
    # Last, because it imports torch, and a new process starts with the peak RSS of its parent.
    report["machine"] = describe_machine()
    report["passed"] = all(passed)
    print(f"\n{'all bars are met' if all(passed) else 'FAIL: a bar is not met'}")
    write_json(options.json, report)
    return 0 if all(passed) else 1


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("download", __doc__)
    command.add_argument("--images", type=int, default=4000, help="number of good images (%(default)s)")
    command.add_argument("--rounds", type=int, default=3, help="times to download the good images (%(default)s)")
    command.add_argument(
        "--rows", type=int, default=5000, help="rows of each case with bad servers; 0: skip them (%(default)s)"
    )
    options = command.parse_args(arguments)
    try:
        sys.exit(run(options))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{command.prog}: {error}")


if __name__ == "__main__":
    main()
