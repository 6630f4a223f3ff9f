"""A classifier of your own images: embed once, fit a linear head, report; then fine-tune."""
