"""A policy behind a socket, in the wire format of openpi's policy server; the extra `serve`."""
