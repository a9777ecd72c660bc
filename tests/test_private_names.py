"""Private names of other packages: each use is in the table of docs/architecture.md, with a reason and a test."""

from pathlib import Path

from tools.private_names import END, Row, find_uses, rows_of, table_of

MOST = 60
"""Uses. A new one takes the place of another."""


def test_every_use_is_in_the_table(repo: Path) -> None:
    page = (repo / "docs" / "architecture.md").read_text()
    made = table_of(find_uses(repo), rows_of(page))
    assert made + END in page, "run: python tools/private_names.py --write docs/architecture.md"


def test_every_name_has_a_reason_and_a_test(repo: Path) -> None:
    rows = rows_of((repo / "docs" / "architecture.md").read_text())
    assert len(rows) >= 30
    assert {name: row for name, row in rows.items() if "?" in row} == {}
    assert {row.test for row in rows.values() if not (repo / row.test).is_file()} == set()


def test_there_are_no_more_than_before(repo: Path) -> None:
    assert len(find_uses(repo)) <= MOST


def test_what_is_found(tmp_path: Path) -> None:
    for folder in ("rlinf_lite/one", "rlinf_lite/two", "examples", "benchmarks", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "constraints.txt").write_text("torch==2.13.0+cpu\n")
    (tmp_path / "rlinf_lite" / "one" / "a.py").write_text(
        "import os\n"
        "import torch._guards\n"
        "from ray import _private as hidden, get\n"
        "from torch import nn\n"
        "from torch.utils._pytree import tree_map, tree_leaves\n"
        "from rlinf_lite.two.b import _ours\n"
        "class Box:\n"
        "    def __init__(self, module):\n"
        "        self._mine = module._theirs.data\n"
        "        self._inherited()\n"
        "        print(nn.Module._load, hidden.worker._global_node, module._mine, (1)._replace)\n"
        "        __import__('torch._C')\n"
        "        os._exit(get._x.y)\n"
    )
    (tmp_path / "rlinf_lite" / "two" / "b.py").write_text("_ours = 1\nprint(_ours, [x._mine for x in ()])\n")
    assert [(use.line, use.name) for use in find_uses(tmp_path)] == [
        (2, "torch._guards"),
        (3, "ray._private"),
        (5, "torch.utils._pytree"),
        (9, "._theirs"),
        (10, "._inherited"),
        (11, "torch.nn.Module._load"),
        (11, "ray._private.worker._global_node"),
        (12, "torch._C"),
        (13, "ray.get._x"),
        (2, "._mine"),  # of b.py: another folder's name is another name
    ]


def test_a_table_keeps_what_is_written_by_hand(repo: Path) -> None:
    rows = {"._elapsed_steps": Row("mani_skill", "a reason", "tests/envs/test_maniskill.py")}
    uses = find_uses(repo)
    table = table_of(uses, rows)
    assert "| a reason | `tests/envs/test_maniskill.py` |" in table
    missing = {use.name for use in uses} - set(rows)
    assert table.count("| ? | `?` |") == len(missing)
