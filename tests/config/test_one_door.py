"""config/ knows no part by name: what it knows of one it asks through the registry."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rlinf_lite.registry import ENVIRONMENTS, POLICIES, REGISTRIES

PARTS = re.compile(
    r"maniskill|tabletop|openvla|metaworld|libero|pi0|smolvla|mlp_gaussian|gaussian_actor|steered|gymnasium", re.I
)


def test_no_environment_or_policy_is_named_in_config(repo: Path) -> None:
    named = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((repo / "rlinf_lite" / "config").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PARTS.search(line)
    ]
    assert named == []
    ours = [name for part in (ENVIRONMENTS, POLICIES) for name, (at, _) in part._entries.items() if isinstance(at, str)]
    assert len(ours) >= 5 and all(PARTS.search(name) for name in ours), "the pattern above knows all of ours"


def test_nothing_is_decided_by_a_parts_name(repo: Path) -> None:
    """No text of code in config/, help and advice aside, is the name of a part."""
    names = {name for registry in REGISTRIES.values() for name in registry.names()}
    found = []
    for path in (repo / "rlinf_lite" / "config").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
                found.append(f"{path.name}:{node.lineno}: {node.value}")
    assert found == []


def test_cards_are_read_without_torch_ray_or_a_simulator(repo: Path) -> None:
    """As `--dry-run` does, and `rlinf-lite info`."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from rlinf_lite.registry import ENVIRONMENTS, POLICIES, env_card, language_card, policy_card\n"
        "cards = [*map(env_card, ENVIRONMENTS.names()), *map(policy_card, POLICIES.names()), language_card()]\n"
        "assert all(card.name for card in cards)\n"
        "print([name for name in ('torch', 'ray', 'gymnasium', 'mani_skill', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repo)
    assert done.stdout.strip() == "[]"
