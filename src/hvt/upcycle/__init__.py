"""A trained ViT made cheap: pooled where it hurts least, then distilled into itself."""

from .._callable import make_callable

make_callable(__name__, "upcycle")
