"""Where images come from, how they are augmented, how they reach the device."""
