"""`rlinf-lite reward`: train a success classifier on logged episodes, calibrate it on held-out ones, and write it for
`env.train.reward`."""

from __future__ import annotations

import argparse
import math
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlinf_lite.cli.parse import positive
from rlinf_lite.registry import install_command, is_installed

_FRAMES = ".frames"
PRINT_INTERVAL_S = 5.0
_LOW_AUC, _FEW = 0.95, 50  # below, a note says what it means


def reward(arguments: Sequence[str]) -> int:
    """Train and write the classifier. Returns the exit code: 0, 1 where the dataset cannot be used, or 2 where an
    argument is wrong."""
    given = parse(arguments)
    missing = [module for module in ("pyarrow", "av") if not is_installed(module)]
    if missing:
        print(f"{' and '.join(missing)} cannot be imported: {install_command('data')}", file=sys.stderr)
        return 2
    if given.out.exists():
        print(f"--out {given.out} exists. Name a new directory", file=sys.stderr)
        return 2

    from rlinf_lite.data.lerobot.layout import LeRobotError  # imported only now, because it takes seconds

    # written under another name and renamed at the end, so that a directory of this name is complete
    partial = given.out.absolute().with_name(f".{given.out.name}-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        _train(given, partial)
        shutil.rmtree(partial / _FRAMES)
        partial.rename(given.out)
    except (LeRobotError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"written to {given.out}")
    print(
        "  learn by it: rlinf-lite train NAME env.train.ignore_terminations=true "
        f"env.train.reward.id=success_classifier env.train.reward.model_dir={given.out}"
    )
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Exits with 2 where an argument is wrong."""
    parser = argparse.ArgumentParser(prog="rlinf-lite reward", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "datasets",
        nargs="+",
        type=Path,
        metavar="DATASET",
        help="a LeRobotDataset with pictures and the column next.success; several are joined",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the classifier is written")
    parser.add_argument("--updates", type=positive, default=1000, metavar="N", help="optimizer updates (default: 1000)")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of weights, batches and the split (default: 0)")
    parser.add_argument(
        "--held-out",
        type=_share,
        default=0.2,
        metavar="SHARE",
        help="share of the episodes that do not train: half calibrates, half is measured (default: 0.2)",
    )
    parser.add_argument(
        "--threshold",
        type=_share,
        default=0.5,
        metavar="P",
        help="probability at which precision and recall are measured, as env.train.reward.threshold (default: 0.5)",
    )
    return parser.parse_args(arguments)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a whole number from 0 to 2^63 - 1")
    return int(text)


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a number between 0 and 1")
    return number


def _train(given: argparse.Namespace, directory: Path) -> None:
    import numpy as np

    from rlinf_lite.training import success

    shown = started = time.monotonic()

    def said(text: str) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= PRINT_INTERVAL_S:
            shown = now
            print(f"  {text}", flush=True)

    logged = success.read_logged(
        given.datasets, directory / _FRAMES, lambda what, done, total: said(f"{what}: {done:,} of {total:,} decoded")
    )
    split = success.split_by_episode(logged, given.held_out, given.seed)
    counts = {
        "num_episodes": logged.num_episodes,
        "num_frames": len(logged.labels),
        "share_of_success": float(logged.labels.mean()),
        "num_frames_training": len(split.training),
        "num_frames_calibration": len(split.calibration),
        "num_frames_test": len(split.test),
    }
    print(
        f"{counts['num_episodes']:,} episodes of {counts['num_frames']:,} frames, {logged.labels.mean():.1%} successes"
    )
    used = [f"{len(split.training):,} train", f"{len(split.calibration):,} calibrate", f"{len(split.test):,} test"]
    held_out = len(np.unique(logged.episodes[split.test]))
    print(f"  {', '.join(used)}, with no episode in two of these", flush=True)
    if held_out < _FEW:
        print(f"note: calibration and test are of {held_out} episodes each, and their figures are rough", flush=True)
    classifier = success.train(
        logged,
        split.training,
        given.updates,
        given.seed,
        lambda update, loss: said(f"update {update:,} of {given.updates:,}: loss {loss:.4f}"),
    )
    logits = {
        part: success.logits_of(classifier, logged, rows)
        for part, rows in (("calibration", split.calibration), ("test", split.test))
    }
    calibration = success.fit_calibration(logits["calibration"], logged.labels[split.calibration])
    classifier.calibration.copy_(calibration)
    found = success.figures(logits["test"], logged.labels[split.test], calibration, given.threshold)
    print(f"on the test frames: AUC {found['auc']:.5f}")
    at = [f"{name} {found[name]:.2%}" for name in ("accuracy", "precision", "recall")]
    print(f"  at {given.threshold:g}: {', '.join(at)}")
    print(f"  calibrated by {calibration[0]:.3f} x logit {calibration[1]:+.3f}:")
    print(f"    calibration error {found['calibration_error_before']:.4f} -> {found['calibration_error']:.4f}")
    print(f"    negative log-likelihood {found['nll_before']:.4f} -> {found['nll']:.4f}")
    print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
    if found["auc"] < _LOW_AUC or found["nll"] > max(found["nll_before"], math.log(2)):
        print("note: this tells success from failure too badly to learn by. Collect more episodes, or train longer")
    settings = {name: getattr(given, name) for name in ("updates", "seed", "held_out", "threshold")}
    classifier.save_pretrained(directory, {"figures": found, "data": counts, "settings": settings})
