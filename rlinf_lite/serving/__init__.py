"""The policy server: serves a policy over a socket, in the wire format of openpi's policy server. Needs the extra
`serve`."""
