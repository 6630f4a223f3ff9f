"""`hvt serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from ..errors import HVTError
from ..zoo import DEFAULT, MODELS
from .flags import add_command, add_fields, add_shared, keywords_of
from .weights import check_pretrained, open_weights


def register(commands: Any) -> None:
    from ..serve.settings import Settings

    parser = add_command(
        commands, "serve", run_serve, "classify images over HTTP",
        "hvt serve\nhvt serve model.onnx --port 8080 --workers 4\n"
        "hvt serve elastic.safetensors --elastic\n"
        "hvt serve model.safetensors --host 0.0.0.0 --allow-host images.example.org\n"
        "curl --data-binary @cat.jpg http://127.0.0.1:8000/predict",
    )  # fmt: skip
    parser.add_argument(
        "checkpoint",
        nargs="?",
        metavar="MODEL",
        help="a checkpoint, an .onnx file, a built-in model or a model's name (default: the "
        f"built-in {DEFAULT})",
    )
    add_shared(parser, "--pretrained")
    add_fields(parser.add_argument_group("settings"), Settings)


def run_serve(args: argparse.Namespace) -> int:
    """Run an HTTP service: POST /predict, GET /healthz, /metrics, /model and /openapi.json.

    The service is stateless, and neither stores nor logs images. The default is the built-in model.
    """
    from ..serve.settings import Settings

    settings = dataclasses.replace(Settings(), **keywords_of(Settings, args))
    check_pretrained(args.checkpoint, args.pretrained)
    try:
        from ..serve.server import serve
    except ImportError as error:
        raise HVTError(f"hvt serve needs {error.name}: pip install 'hvt[serve]'") from error
    from ..checkpoint.save_load import save

    if args.checkpoint not in MODELS:
        return serve(args.checkpoint, settings)
    # As a file, which every worker process can read.
    with tempfile.TemporaryDirectory(prefix="hvt-serve-") as folder:
        path = Path(folder) / f"{args.checkpoint}.safetensors"
        save(open_weights(args.checkpoint, args.pretrained), path)
        return serve(path, settings)
