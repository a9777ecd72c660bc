"""The port of a group's process group: chosen at launch, taken seconds later."""

from pathlib import Path

from torch.distributed import TCPStore

from rlinf_lite.scheduler.processes import free_port

TIME_WAIT = "06"


def test_a_port_is_kept_for_who_asks_for_it():
    port = free_port()
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    states = [fields[3] for fields in table if fields[1].endswith(f":{port:04X}")]
    assert states == [TIME_WAIT]  # the kernel gives such a port to nobody who wants any
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store.port == port
