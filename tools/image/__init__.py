"""Builds the image without a daemon and tries out what is in it: `hatch run image-build`."""
