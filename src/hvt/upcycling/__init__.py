"""A trained ViT made cheap: pooled where it hurts least, then distilled into itself."""
