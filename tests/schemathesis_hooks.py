"""What Schemathesis sends where the description asks for an image."""

import random

import schemathesis
from hostile import drawn, encoded
from hypothesis import strategies as st

from hvt.serve.schema import RAW

STREAM = random.Random(0)
IMAGES = st.sampled_from([encoded(drawn(STREAM), form) for form in ("PNG", "JPEG", "WEBP") * 2])

for media in RAW:
    schemathesis.openapi.media_type(media, IMAGES)
