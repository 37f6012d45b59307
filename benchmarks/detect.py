"""Measure the speed of detection in images/s and CPU-seconds, and compare it with detectron2, if installed.

    python -m benchmarks.detect [--device cuda --batch 8] [--preset vg_resnet101]

The contenders are `detectron2` (fp32), `faster_rcnn fp32` and `faster_rcnn bf16-res5`, with the same random weights.
They take turns on the same generated images, in one process. The report also has the differences between
bf16-res5 and fp32 (IoU of the kept boxes, error of their features), and the FLOPs of the network's stages. On a CPU,
one thread computes and another decodes, so that CPU-seconds measure only useful work.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torchvision
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import format_table, make_parser, run_in_turns, write_json
from benchmarks.synthetic import make_sample
from detectors.detect import DetectorSettings, FasterRCNNDetector, inference_settings, network_class
from detectors.faster_rcnn import PRESETS, FasterRCNN, FasterRCNNConfig
from detectors.preprocess import decode_bgr, resize, resized_size, to_input
from storage.sample import Regions, Sample

DETECTRON2 = "detectron2 fp32"
OURS, HALF = "faster_rcnn fp32", "faster_rcnn bf16-res5"


def run_detector(detector: FasterRCNNDetector, samples: Sequence[Sample]) -> int:
    """Run the detector on all samples, and return their number. Raises ValueError if one cannot be read."""
    errors = [result for result in detector.detect(samples) if isinstance(result, str)]
    if errors:
        raise ValueError(errors[0])
    return len(samples)


def make_contenders(config: FasterRCNNConfig, settings: DetectorSettings) -> dict[str, FasterRCNNDetector]:
    """Make the detectors to compare, by name, with the same random weights. detectron2 is left out if it is missing."""
    detectors = {}
    for name in (DETECTRON2, OURS, HALF):
        backend, precision = name.split()
        try:
            network = network_class(backend).random_init(config, seed=0)
        except ValueError as error:
            print(f"not measured: {name}: {error}")
            continue
        with torch.no_grad():  # larger class scores, so that there are confident boxes to select from
            network.roi_heads.box_predictor.cls_score.weight.mul_(60)
        changed = dataclasses.replace(settings, precision=precision)
        detector = FasterRCNNDetector(network, {"random_init": True, "seed": 0}, changed, backend=backend)
        detector.networks, detectors[name] = 1, detector
    return detectors


def count_flops(config: FasterRCNNConfig, size: tuple[int, int]) -> dict[str, int]:
    """Return each stage's FLOPs for an image of `size` (height, width) after resizing. A multiply-add counts as 2."""
    flops = {}

    def count(stage: str, call: Callable[[], Any]) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = call()
        flops[stage] = counter.get_total_flops()
        return result

    with torch.device("meta"), torch.inference_mode():
        network = FasterRCNN(config)
        c4 = count("backbone", lambda: network.backbone(torch.zeros(1, 3, *size)))
        count("rpn", lambda: network.rpn(c4))
        pooled = torch.zeros(config.post_nms, c4.shape[1], config.pool_size, config.pool_size)
        features = count("pool and res5", lambda: network.roi_heads.res5(pooled).mean(dim=(2, 3)))
        count("heads", lambda: network.roi_heads.box_predictor(features))
    return flops


@torch.inference_mode()
def compare_outputs(exact: FasterRCNNDetector, half: FasterRCNNDetector, samples: Sequence[Sample]) -> dict[str, float]:
    """Return statistics of the differences between the regions and features of `half` and `exact`, over all samples."""
    overlaps, errors, cosines, labels = [], [], [], []
    detected = [detector.detect(samples) for detector in (exact, half)]
    for sample, ours, theirs in zip(samples, *detected, strict=True):
        if not isinstance(ours, Regions) or not isinstance(theirs, Regions):
            continue
        iou = torchvision.ops.box_iou(torch.from_numpy(ours.boxes), torch.from_numpy(theirs.boxes))
        best, nearest = iou.max(dim=1)
        overlaps += best.tolist()
        labels += (ours.labels == theirs.labels[nearest.numpy()])[(best > 0.9).numpy()].tolist()
        pixels = to_input(resize(decode_bgr(sample.image), exact.network.config), exact.settings.device)
        c4 = exact.network.backbone(pixels)
        logits, deltas = exact.network.rpn(c4)
        boxes, _ = exact.network.proposals(logits, deltas, pixels.shape[2], pixels.shape[3])
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
    """Measure all contenders, and print the report. Write it to options.json, too, if that is given."""
    config = PRESETS[options.preset]
    samples = [make_sample(number, None, (800, 600)) for number in range(options.count)]
    settings = DetectorSettings(device=options.device, batch=options.batch)
    detectors = make_contenders(config, settings)
    for name, detector in detectors.items():
        run_detector(detector, samples[: settings.batch])  # warm-up
        print(f"{name}: warm", file=sys.stderr)
    turns = {name: functools.partial(run_detector, detector, samples) for name, detector in detectors.items()}
    times = {
        name: [(timing.wall / len(samples), timing.cpu / len(samples)) for timing in timings]
        for name, timings in run_in_turns(turns, options.rounds, options.device).items()
    }
    exact = detectors[OURS]
    with inference_settings():
        differences = compare_outputs(exact, detectors[HALF], samples)
    flops = count_flops(config, resized_size(samples[0].height, samples[0].width, config))
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "one thread of a CPU"
    print(f"\nat most {config.post_nms} proposals, {len(samples)} images, {options.rounds} rounds, {device}")
    res5_share = flops["pool and res5"] / sum(flops.values())
    print(f"{sum(flops.values()) / 1e12:.3f} TFLOP per image, {res5_share:.0%} in res5\n")

    table = [["detect(), in turns", "images/s", "s/image", "CPU-s/image", "of detectron2"]]
    report = {"device": device, "flops": flops, "contenders": {}, "differences": differences}
    base = statistics.median(cpu for _, cpu in times[DETECTRON2]) if DETECTRON2 in times else None
    for name, rounds in times.items():
        wall, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
        share = f"{cpu / base:.3f}" if base else ""
        table.append([name, f"{1 / wall:.3f}", f"{wall:.3f}", f"{cpu:.3f}", share])
        report["contenders"][name] = {"rounds": rounds}
    print(f"\n{format_table(table)}")
    print("\nbf16-res5 against fp32")
    for name, value in differences.items():
        print(f"  {name}: {value:.5g}")
    write_json(options.json, report)


def main(arguments: Sequence[str] | None = None) -> None:
    command = make_parser("detect", __doc__)
    command.add_argument("--preset", choices=sorted(PRESETS), default="vg_resnet101", help="network (%(default)s)")
    command.add_argument("--count", type=int, default=2, help="number of images (%(default)s)")
    command.add_argument("--rounds", type=int, default=3, help="turns of each contender (%(default)s)")
    command.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    command.add_argument("--batch", type=int, default=1, help="images per batch (%(default)s)")
    try:
        compare(command.parse_args(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"{command.prog}: {error}")


if __name__ == "__main__":
    main()
