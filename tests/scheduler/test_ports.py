"""The port of a group's process group is chosen at launch, and opened seconds later."""

from pathlib import Path

from torch.distributed import TCPStore

from rlinf_lite.scheduler.processes import free_port

TIME_WAIT = "06"


def test_a_port_is_kept_for_who_asks_for_it():
    port = free_port()
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    states = [fields[3] for fields in table if fields[1].endswith(f":{port:04X}")]
    assert states == [TIME_WAIT]  # the kernel does not assign such a port to programs that ask for any port
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert store.port == port
