"""Measure detection: images/s and CPU-seconds, beside detectron2 where it is installed.

    python -m benchmarks.detect [--device cuda --batch 8] [--preset vg_resnet101]

Every contender detects the same drawn images, in turns, in one process: `detectron2` (fp32), `faster_rcnn fp32` and
`faster_rcnn bf16-res5`, with the same random weights. Then it says how far bf16-res5 is from fp32: IoU of the boxes
kept, error of their features; and how many FLOPs the stages of the network take.
On a CPU one thread computes and another decodes, so that CPU-seconds are those of the work.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import in_turns, parser, shown, write_json
from benchmarks.synthetic import drawn_sample
from detectors.detect import DetectorSettings, FasterRCNNDetector, inference_settings, network_class
from detectors.faster_rcnn import PRESETS, FasterRCNN, FasterRCNNConfig
from detectors.preprocess import decode_bgr, resize, resized_size, to_input
from storage.sample import Regions, Sample

DETECTRON2 = "detectron2 fp32"
OURS, HALF = "faster_rcnn fp32", "faster_rcnn bf16-res5"


def detected(detector: FasterRCNNDetector, samples: Sequence[Sample]) -> int:
    """How many images; ValueError where one could not be read."""
    wrong = [found for found in detector.detect(samples) if isinstance(found, str)]
    if wrong:
        raise ValueError(wrong[0])
    return len(samples)


def contenders(config: FasterRCNNConfig, settings: DetectorSettings) -> dict[str, FasterRCNNDetector]:
    """Name -> detector, of the same random weights; detectron2's only where it is installed."""
    detectors = {}
    for name in (DETECTRON2, OURS, HALF):
        backend, precision = name.split()
        try:
            network = network_class(backend).random_init(config, seed=0)
        except ValueError as error:
            print(f"not measured: {name}: {error}")
            continue
        with torch.no_grad():  # sure of something, so that there are confident boxes to choose from
            network.roi_heads.box_predictor.cls_score.weight.mul_(60)
        own = dataclasses.replace(settings, precision=precision)
        detectors[name] = FasterRCNNDetector(network, {"random_init": True, "seed": 0}, own, backend=backend)
    return detectors


def counted_flops(config: FasterRCNNConfig, size: tuple[int, int]) -> dict[str, int]:
    """Stage -> FLOPs of one image of this resized size, 2 a multiplication and addition; nothing is computed."""
    flops = {}

    def counted(stage: str, work: Callable[[], object]) -> object:
        with FlopCounterMode(display=False) as counter:
            result = work()
        flops[stage] = counter.get_total_flops()
        return result

    with torch.device("meta"), torch.inference_mode():
        network = FasterRCNN(config)
        c4 = counted("backbone", lambda: network.backbone(torch.zeros(1, 3, *size)))
        counted("rpn", lambda: network.rpn(c4))
        pooled = torch.zeros(config.post_nms, c4.shape[1], config.pool_size, config.pool_size)
        features = counted("pool and res5", lambda: network.roi_heads.res5(pooled).mean(dim=(2, 3)))
        counted("heads", lambda: network.heads(features))
    return flops


@torch.inference_mode()
def differences(exact: FasterRCNNDetector, half: FasterRCNNDetector, samples: Sequence[Sample]) -> dict[str, float]:
    """How far regions and features of `half` are from those of `exact`, over all the samples."""
    overlaps, errors, cosines, labels = [], [], [], []
    found = [detector.detect(samples) for detector in (exact, half)]
    for sample, ours, theirs in zip(samples, *found, strict=True):
        if not isinstance(ours, Regions) or not isinstance(theirs, Regions):
            continue
        iou = torchvision.ops.box_iou(torch.from_numpy(ours.boxes), torch.from_numpy(theirs.boxes))
        best, which = iou.max(dim=1)
        overlaps += best.tolist()
        labels += (ours.labels == theirs.labels[which.numpy()])[(best > 0.9).numpy()].tolist()
        pixels = to_input(resize(decode_bgr(sample.image), exact.network.config), exact.settings.device)
        c4 = exact.network.backbone(pixels)
        logits, deltas = exact.network.rpn(c4)
        boxes, _ = exact.network.proposals(logits, deltas, *pixels.shape[2:])
        a, b = (detector.network.roi_features(c4, boxes) for detector in (exact, half))
        errors += ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-6)).tolist()
        cosines += torch.nn.functional.cosine_similarity(a, b).tolist()
    return {
        "boxes kept by fp32": len(overlaps),
        "mean IoU of each with the nearest that bf16-res5 keeps": statistics.mean(overlaps),
        "share with IoU > 0.9": float(np.mean(np.array(overlaps) > 0.9)),
        "of those, share with the same class": statistics.mean(labels) if labels else float("nan"),
        "relative error of features, mean": statistics.mean(errors),
        "relative error of features, largest": max(errors),
        "cosine of features, least": min(cosines),
    }


def compare(options: argparse.Namespace) -> None:
    """Measure and print all."""
    config = PRESETS[options.preset]
    samples = [drawn_sample(number, None, (800, 600)) for number in range(options.count)]
    settings = DetectorSettings(device=options.device, batch=options.batch)
    detectors = contenders(config, settings)
    for name, detector in detectors.items():
        detected(detector, samples[: settings.batch])  # whatever is done once
        print(f"{name}: warm", file=sys.stderr)
    turns = {name: functools.partial(detected, detector, samples) for name, detector in detectors.items()}
    times = {
        name: [(spent.wall / len(samples), spent.cpu / len(samples)) for spent in found]
        for name, found in in_turns(turns, options.rounds, options.device).items()
    }
    exact = detectors[OURS]
    with inference_settings():
        apart = differences(exact, detectors[HALF], samples)
    flops = counted_flops(config, resized_size(samples[0].height, samples[0].width, config))
    on = torch.cuda.get_device_name() if options.device.startswith("cuda") else "one thread of a CPU"
    print(f"\n{config.post_nms} proposals at most, {len(samples)} images, {options.rounds} rounds, {on}")
    print(
        f"{sum(flops.values()) / 1e12:.3f} TFLOP an image, {flops['pool and res5'] / sum(flops.values()):.0%} in res5\n"
    )

    table = [["detect(), in turns", "images/s", "s an image", "CPU-s an image", "of detectron2"]]
    report = {"device": on, "flops": flops, "contenders": {}, "differences": apart}
    base = statistics.median(cpu for _, cpu in times[DETECTRON2]) if DETECTRON2 in times else None
    for name, rounds in times.items():
        wall, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        share = f"{cpu / base:.3f}" if base else ""
        table.append([name, f"{1 / wall:.3f}", f"{wall:.3f}", f"{cpu:.3f}", share])
        report["contenders"][name] = {"rounds": rounds}
    print(f"\n{shown(table)}")
    print("\nbf16-res5 beside fp32")
    for what, value in apart.items():
        print(f"  {what}: {value:.5g}")
    write_json(options.json, report)


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser("detect", __doc__)
    command.add_argument("--preset", choices=sorted(PRESETS), default="vg_resnet101", help="(%(default)s)")
    command.add_argument("--count", type=int, default=2, help="images (%(default)s)")
    command.add_argument("--rounds", type=int, default=3, help="turns of each contender (%(default)s)")
    command.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    command.add_argument("--batch", type=int, default=1, help="images at a time (%(default)s)")
    try:
        compare(command.parse_args(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"{command.prog}: {error}")


if __name__ == "__main__":
    main()
