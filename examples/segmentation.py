"""Semantic segmentation: torchvision's FPN on a 2D-pooled HVT and on a plain ViT of equal cost.

python examples/segmentation.py --data camvid --weights deit_tiny_patch16_224.safetensors
"""

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hvt
from hvt.features import FeatureMaps
from hvt.upcycling.student import pooled

CLASSES = ["sky", "building", "pole", "road", "pavement", "tree"]
CLASSES += ["sign", "fence", "car", "pedestrian", "cyclist"]
COLOURS = bytes.fromhex("808080800000c0c0808040803c28de808000c080804040804000804040000080c0000000")
VOID = len(CLASSES)  # not scored
# Equal GFLOPs: what pooling saves in the last two blocks pays for 12 % more pixels.
POOL = {"pool_after": (9,), "pool_dims": 2, "pool": "avg", "proportional_attention": True}
BACKBONES: dict[str, dict[str, Any]] = {
    "pooled HVT": POOL | {"img_size": (256, 336), "levels": (5, 8, 11)},
    "plain ViT": {"img_size": (240, 320), "levels": (2, 6, 11)},
}
norm = functools.partial(nn.GroupNorm, 8)


def backbone(source: hvt.HVT, levels: tuple[int, ...] | None = None, **fields: Any) -> FeatureMaps:
    """`features_only` of a trained ViT, pooled as the fields say; a level per stage by default."""
    config = source.config.replace(**fields)
    if config.pool_dims == 1 and config.pool_blocks:
        raise hvt.HVTError("1D pooling leaves no grid to build a pyramid on: use pool_dims=2")
    source.set_input_size(config.img_size)
    return FeatureMaps(pooled(source, config), levels)


class Segmenter(nn.Module):
    """An FPN on feature maps, the sum of its levels and two convolutions."""

    def __init__(self, maps: FeatureMaps, channels: int = 64) -> None:
        super().__init__()
        from torchvision.ops import FeaturePyramidNetwork  # imports without operators after hvt

        self.maps = maps
        self.neck = FeaturePyramidNetwork(maps.feature_info.channels(), channels, norm_layer=norm)
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.head = nn.Sequential(conv, norm(channels), nn.ReLU(), nn.Conv2d(channels, VOID, 1))

    def forward(self, images: Tensor) -> Tensor:  # bytes, (B, 3, H, W) → (B, 11, H, W)
        model: Any = self.maps.model
        mean, std = (torch.tensor(model.pretrained_cfg[k]).view(3, 1, 1) for k in ("mean", "std"))
        x = F.interpolate(images / 255, model.config.image, mode="bilinear")
        maps = self.maps((x - mean) / std)
        levels = list(self.neck({str(i): y for i, y in enumerate(maps)}).values())
        levels = [F.interpolate(y, levels[0].shape[2:], mode="bilinear") for y in levels]
        return F.interpolate(self.head(sum(levels)), images.shape[2:], mode="bilinear")


def read(folder: Path) -> tuple[Tensor, Tensor]:  # bytes, (N, 3, H, W) and (N, H, W)
    paths = sorted((folder / "images").iterdir())
    images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    masks = [np.asarray(Image.open(folder / "masks" / f"{path.stem}.png")) for path in paths]
    return torch.tensor(np.stack(images)).permute(0, 3, 1, 2), torch.tensor(np.stack(masks))


def train(model: Segmenter, images: Tensor, masks: Tensor, steps: int, lr: float = 2e-3) -> None:
    """One cycle of the learning rate, a tenth in the backbone; rare classes count more."""
    parts = [{"params": [*part.parameters()]} for part in (model.maps, model.neck, model.head)]
    optimizer = torch.optim.AdamW(parts, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [lr / 10, lr, lr], steps)
    weight = torch.bincount(masks.flatten(), minlength=VOID)[:VOID].clamp(min=1).rsqrt()
    height, width = masks.shape[1:]
    passes = [torch.randperm(len(images)) for _ in range(8 * steps // len(images) + 1)]
    for step, rows in enumerate(torch.cat(passes).split(8)[:steps]):
        size, down, right, flip = torch.rand(4).tolist()  # the same for the whole batch
        h, w = int(height * (1 + size) / 2), int(width * (1 + size) / 2)
        top, left = int(down * (height - h)), int(right * (width - w))
        x, y = (data[rows, ..., top : top + h, left : left + w] for data in (images, masks))
        if flip < 0.5:
            x, y = x.flip(-1), y.flip(-1)
        loss = F.cross_entropy(model.train()(x), y.long(), weight, ignore_index=VOID)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(f"step {step}, {time.process_time():.0f} s of CPU: loss {loss.item():.3f}")


@torch.no_grad()
def predict(model: Segmenter, images: Tensor) -> Tensor:  # (N, 3, H, W) → (N, H, W)
    return torch.cat([model.eval()(part).argmax(dim=1) for part in images.split(8)])


def class_ious(predicted: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of each class, of all pixels that are not void; NaN if absent."""
    pairs = (truth.long() * VOID + predicted)[truth != VOID]
    counts = torch.bincount(pairs, minlength=VOID**2).view(VOID, VOID)
    hits = counts.diagonal()
    return hits / (counts.sum(dim=0) + counts.sum(dim=1) - hits)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An FPN on a pooled HVT and on a plain ViT.")
    parser.add_argument("--data", type=Path, required=True, help="CamVid: train/ and val/")
    parser.add_argument("--weights", type=Path, required=True, help="checkpoint of a DeiT-Tiny")
    parser.add_argument("--figure", type=Path, default="masks.png", help="masks, as a PNG")
    parser.add_argument("--steps", type=int, default=450, help="batches of 8 images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    (images, masks), (scenes, truth) = (read(args.data / part) for part in ("train", "val"))
    models = {}
    for name, fields in BACKBONES.items():
        torch.manual_seed(args.seed)
        models[name] = Segmenter(backbone(hvt.load(args.weights), **fields))
        train(models[name], images, masks, args.steps)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for name, model in [*models.items()] * 15:  # in turns
        start = time.perf_counter()
        predict(model, scenes[:8])
        seconds[name].append(time.perf_counter() - start)
    drawn = [truth[::50]]  # without the photographs
    for name, model in models.items():
        masks = predict(model, scenes)
        drawn.append(masks[::50])
        ious, speed = class_ious(masks, truth), len(scenes[:8]) / statistics.median(seconds[name])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            predict(model, scenes[:1])  # the counter knows plain attention only
        print(f"{name}: {counter.get_total_flops() / 2e9:.3f} GFLOPs, {speed:.2f} images/s")
        print(f"mean IoU {ious.nanmean():.1%}:", *map("{} {:.1%}".format, CLASSES, ious.tolist()))
    image = Image.fromarray(torch.cat([m.flatten(0, 1) for m in drawn], dim=1).byte().numpy())
    image.putpalette(COLOURS)
    image.save(args.figure)


if __name__ == "__main__":
    try:
        main()
    except hvt.HVTError as error:
        raise SystemExit(f"error: {error}") from None
