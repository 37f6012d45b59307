"""What downloading costs: CPU-ms an image, memory, and the seconds that hanging and dripping servers take.

    python -m benchmarks.download [--images 4000 --rounds 3 --rows 5000 --json FILE]

A server of its own process answers on loopback addresses, each of which is a host to the downloader. First good images
alone (500 x 375 pixels, about 50 kB, no two the same), then rows of which some name servers that never answer or that
send a byte at a time, then rows of one host alone, which takes 0.1 s for each and never answers one in fifty.
`vlbert collect` downloads, checks, hashes and commits them to a local folder, in a process of its own: its CPU time
and memory are measured, its children's included, the server's not.
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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import machine, parser, write_json
from storage.collect.download import DownloadSettings
from storage.collect.plan import CollectSettings
from storage.collect.run import collect

IN_FLIGHT = 64
GOOD_HOSTS = [f"127.0.0.{number}" for number in range(2, 52)]
HANGING_HOSTS = [f"127.0.1.{number}" for number in range(1, 41)]
DRIPPING_HOSTS = [f"127.0.2.{number}" for number in range(1, 11)]
ONE_HOST, ONE_HOST_SECONDS, ONE_HOST_HANGS = "127.0.4.1", 0.1, 50  # that takes so long; one in so many never comes
HOSTS = (*GOOD_HOSTS, *HANGING_HOSTS, *DRIPPING_HOSTS, ONE_HOST)
ROBOTS_TXT = b"User-agent: *\nDisallow: /wp-admin/\nAllow: /wp-admin/admin-ajax.php\nDisallow: /*?s=\n"
DRIP_SECONDS = 0.2  # between two bytes
BARS = {"CPU-ms an image": 3.0, "peak RSS, MB": 600.0, "seconds": 60.0}


class Server:
    """The loopback server in a process of its own; a context manager."""

    def __enter__(self) -> "Server":
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        if not here.poll(120):
            raise TimeoutError("the server did not start within 120 s")
        self.port, self.image_bytes = here.recv()
        self._pipe = here
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def hosts(self) -> tuple[str, ...]:
        """All of them as an allow-list names them."""
        return tuple(f"{host}:{self.port}" for host in HOSTS)


def _serve(pipe: Connection) -> None:
    # No ordinary limit of open files is enough for every connection of a few thousand rows.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    from benchmarks.synthetic import drawn_jpeg  # here, so that the process that is measured is without torch

    images = [drawn_jpeg(500, 375, number) for number in range(24)]
    mean = statistics.mean(map(len, images))

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
                image = images[number % len(images)]
                # A comment behind the start marker, so that no two are the same.
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
        await asyncio.get_running_loop().run_in_executor(None, pipe.poll, None)  # until the benchmark is gone

    asyncio.run(serve())


def rows(
    server: Server, images: int, bad_hosts: Sequence[str] = (), bad: int = 0, hosts: Sequence[str] = GOOD_HOSTS
) -> list[str]:
    """Lines of a caption list: `images` of these hosts and `bad` of each bad server among them."""
    lines = [
        f"image {number}\thttp://{hosts[number % len(hosts)]}:{server.port}/{number}.jpg" for number in range(images)
    ]
    lines += [
        f"bad {host} {number}\thttp://{host}:{server.port}/{number}.jpg" for host in bad_hosts for number in range(bad)
    ]
    random.Random(0).shuffle(lines)
    return lines


def measured(server: Server, lines: Sequence[str], settings: DownloadSettings) -> dict:
    """Collect the list in a process of its own; seconds, CPU-seconds, peak RSS in MB, rows by status."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="download-") as folder:
        captions = Path(folder, "list.tsv")
        captions.write_text("".join(f"{line}\n" for line in lines))
        process = context.Process(target=_collect, args=(there, folder, str(captions), settings))
        process.start()
        there.close()
        try:
            return here.recv()
        except EOFError:
            raise RuntimeError("the collecting process ended early; its error stands above") from None
        finally:
            process.join()


def _collect(pipe: Connection, folder: str, captions: str, settings: DownloadSettings) -> None:
    dataset = CollectSettings("captions", captions=captions, download=settings)
    before, begin = _cpu_seconds(), time.perf_counter()
    collected = collect(str(Path(folder, "root")), dataset, lambda line: None)
    facts = {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": _cpu_seconds() - before,
        "cpu_seconds_of_imports": before,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "statuses": collected.counts,
    }
    pipe.send(facts)


def _cpu_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in times)


def check(what: str, value: float, bar: str) -> bool:
    """Print one measure beside its bar; whether it holds."""
    passed = value <= BARS[bar]
    print(f"{what:<58}{value:>10.2f}{BARS[bar]:>8.0f}  {'pass' if passed else 'FAIL'}", flush=True)
    return passed


def run(options: argparse.Namespace) -> int:
    """Measure and print all; the exit status."""
    report = {"images": options.images, "in_flight": IN_FLIGHT, "bars": BARS}
    passed = []
    with Server() as server:
        report["image_bytes"] = server.image_bytes
        settings = DownloadSettings(allowed_hosts=server.hosts, concurrency=IN_FLIGHT)
        print(f"{options.images} images of {server.image_bytes / 1000:.1f} kB on average, {IN_FLIGHT} in flight\n")
        print(f"{'':<58}{'measured':>10}{'bar':>8}")
        report["good"] = []
        for number in range(options.rounds):
            facts = measured(server, rows(server, options.images), settings)
            report["good"].append(facts)
            if facts["statuses"] != {"ok": options.images}:
                raise RuntimeError(f"not all images were stored: {facts['statuses']}")
            rate = options.images / facts["seconds"]
            cost = 1000 * facts["cpu_seconds"] / options.images
            passed.append(check(f"round {number + 1}: CPU-ms an image ({rate:.0f} images/s)", cost, "CPU-ms an image"))
            passed.append(check(f"round {number + 1}: peak RSS, MB", facts["peak_rss_mb"], "peak RSS, MB"))
        report["hostile"] = {}
        slow = (*HANGING_HOSTS, *DRIPPING_HOSTS)
        what = f"{options.rows} rows, {len(HANGING_HOSTS)} hanging and {len(DRIPPING_HOSTS)} dripping servers"
        cases = {f"{what}, {bad} each": rows(server, options.rows - bad * len(slow), slow, bad) for bad in (1, 20)}
        what = f"{options.rows} rows of one host, which takes {ONE_HOST_SECONDS} s or, one in {ONE_HOST_HANGS}, hangs"
        cases[what] = rows(server, options.rows, hosts=[ONE_HOST])
        for what, lines in cases.items() if options.rows else ():
            # As a user has it who sets nothing.
            facts = measured(server, lines, DownloadSettings(allowed_hosts=server.hosts))
            report["hostile"][what] = facts
            passed.append(check(what, facts["seconds"], "seconds"))
            print(f"    {', '.join(f'{count} {status}' for status, count in facts['statuses'].items())}")
            passed.append(check("    peak RSS, MB", facts["peak_rss_mb"], "peak RSS, MB"))
    report["machine"] = machine()  # last: it loads torch, and a process begins with the peak RSS of the one before it
    report["passed"] = all(passed)
    print(f"\n{'all bars hold' if all(passed) else 'a bar does not hold'}")
    write_json(options.json, report)
    return 0 if all(passed) else 1


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("download", __doc__)
    command.add_argument("--images", type=int, default=4000, help="good images (%(default)s)")
    command.add_argument("--rounds", type=int, default=3, help="times that they are downloaded (%(default)s)")
    command.add_argument(
        "--rows", type=int, default=5000, help="rows with bad servers among them; 0: none (%(default)s)"
    )
    options = command.parse_args(arguments)
    try:
        sys.exit(run(options))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"{command.prog}: {error}")


if __name__ == "__main__":
    main()
