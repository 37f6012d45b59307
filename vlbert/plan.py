"""Plan: what the road from a caption list to a pre-trained model will need, before anything is downloaded or rented.

    vlbert plan pretrain_vlbert_base --list captions.tsv --card h100 --cards 8 --price 2.5
    vlbert plan pretrain_vlbert_base --rows 3300000 data.cache=/scratch data.cache_gb=400 --json plan.json

Prints one page: images that survive, GB, requests to a bucket, hours and cost of each stage, and what does not fit.
--sample requests URLs of the list, and counts how they end.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detectors.config import DetectionConfig
from detectors.faster_rcnn import PRESETS
from storage.collect.download import Download, Downloader
from storage.collect.plan import CollectSettings, sample_list
from storage.collect.rows import CaptionRow
from storage.collect.spool import Spool
from storage.programs import make_parser
from storage.settings import override
from training.program import add_recipe_fields, find_recipe
from vlbert.needs import (
    FIGURES,
    GB,
    SEED,
    CaptionList,
    Machine,
    Plan,
    Survival,
    check_pretraining,
    figure,
    make_plan,
)
from vlbert.recipes import RECIPES

if TYPE_CHECKING:
    from training.cards import Card


# --- the list ---------------------------------------------------------------------------------------------------------


def read_list(settings: CollectSettings, examples: int) -> CaptionList:
    """Every row is read. ValueError names a file that cannot be read."""
    try:
        found = sample_list(settings, examples, SEED)
    except OSError as error:
        raise ValueError(
            f"--list {settings.captions} cannot be read: {error.strerror}; name a caption list (docs/download.md), or "
            "give its length: --rows N"
        ) from error
    return CaptionList(found.rows, found.duplicates, found.examples)


def made_up_list(rows: int) -> CaptionList:
    """Of so many rows; keys and URLs are as hard to compress as real ones."""
    if rows < 1:
        raise ValueError(f"--rows is {rows}; give the length of the list, at least 1")
    url, rng = "https://images{}.example.org/photos/{}.jpg", random.Random(SEED)
    caption = "word " * round((figure("text") - 80) / 5)
    return CaptionList(
        rows, 0, [CaptionRow(n, caption, url.format(n % 977, rng.randbytes(18).hex())) for n in range(1000)]
    )


def assumed(share: float | None, image: float | None, settings: CollectSettings) -> Survival:
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--share is {share:g}; give the share of rows that become images, over 0 and at most 1")
    if image is not None and not image > 0:
        raise ValueError(f"--image-bytes is {image:g}; give the bytes of a stored image, over 0")
    source = "as given" if share is not None else FIGURES["share"].source
    share = figure("share") if share is None else share
    # Few images of the web are smaller than 1,024 pixels and larger than max_side, so this is what they take at least.
    shrunk = min(1.0, settings.download.max_side / 1024) ** 2
    return Survival(share, source, image or figure("image") * shrunk, share, share)


def sample(listed: CaptionList, settings: CollectSettings, image: float | None) -> Survival:
    """Download the list's examples, as a collection does, and keep none; ValueError where none is an image."""
    settled: list[float] = []

    async def download(spool: Spool) -> list[Download]:
        async with Downloader(settings.download) as downloader:
            return await downloader.download(listed.examples, spool, lambda url, outcome: settled.append(clock()))

    def clock() -> float:
        return time.monotonic() - begin

    begin = time.monotonic()
    with Spool() as spool:
        found = asyncio.run(download(spool))
        statuses = Counter(one.status for one in found)
        sizes = [one.image.length for one in found if one.image]
    counts = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    if not sizes:
        raise ValueError(
            f"none of {len(found)} URLs of {settings.origin} gave an image ({counts}, docs/download.md); check this "
            "machine's network and --collect download.allowed_hosts=HOST:PORT, or plan without --sample"
        )
    n, share, rows = len(found), len(sizes) / len(found), listed.rows - listed.duplicates
    # Wilson's interval, narrowed for a sample that is a good part of the list.
    z2 = 1.96**2 * (rows - n) / max(1, rows - 1)
    middle, half = share + z2 / (2 * n), math.sqrt(z2 * (share * (1 - share) + z2 / (4 * n)) / n)
    most = settled[int(0.9 * (len(settled) - 1))]
    return Survival(
        share,
        f"a sample of {n} URLs: {counts}",
        image or sum(sizes) / len(sizes),
        (middle - half) / (1 + z2 / n),
        (middle + half) / (1 + z2 / n),
        dict(statuses),
        0.9 * n / max(most, 1e-3),
        settled[-1] - most,
    )


# --- the page ---------------------------------------------------------------------------------------------------------


def page(plan: Plan) -> str:
    survival, total = plan.survival, plan.stages
    sampled = f" ({survival.low:.1%} to {survival.high:.1%})" if survival.statuses else ""
    lines = [
        f"{plan.recipe} on {plan.cards} x {plan.card}",
        "",
        f"rows      {plan.rows:,}, of them {plan.duplicates:,} repeated; {plan.shards:,} shards",
        f"images    {plan.images:,}: {survival.share:.1%}{sampled} survive, {survival.source}",
        f"epochs    {plan.epochs:,.1f}",
        "",
        f"{'stage':<14}{'hours':>9}{'EUR':>9}{'GB left':>10}{'requests':>14}   spent on",
    ]
    for one in total:
        numbers = f"{one.hours:>9,.2f}{one.euros:>9,.2f}{_shown(one.bytes / GB):>10}{one.requests:>14,}"
        lines.append(f"{one.name:<14}{numbers}   {one.bound}")
    sums = [sum(getattr(one, name) for one in total) for name in ("hours", "euros", "bytes", "requests")]
    lines += [f"{'all':<14}{sums[0]:>9,.2f}{sums[1]:>9,.2f}{_shown(sums[2] / GB):>10}{sums[3]:>14,}", ""]
    for name, size in plan.bytes.items():
        lines.append(f"{name:<34}{_shown(size / GB):>12} GB")
    lines.append("")
    for check in plan.checks:
        there = "?" if check.available is None else _shown(check.available)
        verdict = {True: "fits", False: f"DOES NOT FIT: {check.way_out}", None: "not known: give --disk"}[check.fits]
        lines.append(f"{check.what:<28}{_shown(check.needed):>10} of {there:>8} {check.unit:<7} {verdict}")
    lines.append("\nassumed or measured elsewhere:")
    lines += [f"  {name:<14}{_shown(one.value):>14} {one.unit}: {one.source}" for name, one in FIGURES.items()]
    return "\n".join(lines)


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


# --- as a program -----------------------------------------------------------------------------------------------------


def main(
    arguments: Sequence[str] | None = None, cards: "Mapping[str, Card] | None" = None, rehearsal: Any = None
) -> None:
    """cards, rehearsal: in place of training.cards.CARDS and of the module vlbert.rehearsal."""
    if cards is None:
        from training import cards as known
        from vlbert import rehearsal

        cards = known.CARDS
    parser = _parser(cards, arguments)
    options = parser.parse_intermixed_args(arguments)
    try:
        plan = _planned(options, cards, rehearsal)
        if options.json:
            Path(options.json).write_text(json.dumps(plan.to_json(), indent=1) + "\n")
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    if not options.json:
        print(page(plan))


def _parser(cards: "Mapping[str, Card]", arguments: Sequence[str] | None) -> argparse.ArgumentParser:
    parser = make_parser("vlbert plan", __doc__)
    parser.add_argument("recipe", metavar="RECIPE", help="a pre-training, or MODULE:FUNCTION")
    add_recipe_fields(parser, RECIPES, arguments)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--list", metavar="FILE", help="caption list (docs/download.md)")
    which.add_argument("--rows", type=int, metavar="N", help="length of a list, in its place")
    add = parser.add_argument
    add("--sample", nargs="?", type=int, const=1000, metavar="N", help="request N URLs of the list (1000)")
    add("--share", type=float, help=f"share of rows that become images ({figure('share'):g})")
    add("--image-bytes", type=float, help=f"bytes of a stored image ({figure('image'):,.0f})")
    add("--regions", type=float, help="regions of an image (the middle of what the selection allows)")
    add("--card", default="h100", help=f"{', '.join(cards)} (%(default)s)")
    add("--cards", type=int, default=1, help="how many, in one machine (%(default)s)")
    add("--price", type=float, help="euros an hour of one card (that of training/cards.py)")
    add("--cpu-price", type=float, default=0.2, help="euros an hour of the machine that collects (%(default)s)")
    add("--bandwidth", type=float, default=1000, help="megabits a second of the machine that collects (%(default)s)")
    add("--disk", type=float, metavar="GB", help="free on each machine")
    add("--preset", choices=PRESETS, default="vg_resnet101", help="of the detector (%(default)s)")
    add("--collect", action="append", default=[], metavar="field=value", help="a setting of storage.collect.run")
    add("--detect", action="append", default=[], metavar="field=value", help="a setting of detectors.run")
    add("--json", metavar="FILE", help="write it to a file, as JSON")
    return parser


def _planned(options: argparse.Namespace, cards: "Mapping[str, Card]", rehearsal: Any) -> Plan:
    recipe = override(find_recipe(options.recipe, RECIPES)(), options.fields)
    check_pretraining(recipe)
    if options.card not in cards:
        raise ValueError(f"--card {options.card} is not known; name one of {', '.join(cards)}")
    card = cards[options.card]
    machine = Machine(
        card=card,
        cards=options.cards,
        price=card.price if options.price is None else options.price,
        cpu_price=options.cpu_price,
        bandwidth=options.bandwidth * 1e6 / 8,
        disk=None if options.disk is None else options.disk * GB,
        rehearse_training=rehearsal.rehearse_training,
        rehearse_detection=rehearsal.rehearse_detection,
    )
    collection = override(CollectSettings("captions", options.list or "captions.tsv"), options.collect)
    # On a GPU, as docs/detector.md has it; which weights are read decides nothing here.
    detection = DetectionConfig(
        random_init=True, preset=options.preset, device="cuda", precision="bf16-res5", tf32=True, batch=8, workers=8
    )
    features = recipe.model.regions.features == "precomputed"
    detection = override(detection, [f"keep_features={str(features).lower()}", *options.detect])
    if features and not detection.keep_features:
        raise ValueError(f"recipe {recipe.name} reads stored features; leave out --detect keep_features=false")
    if options.sample is None:
        survival = assumed(options.share, options.image_bytes, collection)
    elif options.sample < 1 or not options.list or options.share is not None:
        raise ValueError("--sample needs --list FILE, at least 1 URL and no --share; or leave it out, and give --share")
    listed = read_list(collection, options.sample or 1000) if options.list else made_up_list(options.rows)
    if options.sample is not None:
        if not collection.download.contact and not collection.download.allowed_hosts:
            print(
                "no contact is set: --collect download.contact=URL tells the servers' owners who asks", file=sys.stderr
            )
        survival = sample(listed, collection, options.image_bytes)
    return make_plan(recipe, listed, survival, collection, detection, machine, options.regions)


if __name__ == "__main__":
    main()
