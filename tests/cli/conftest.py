import pytest


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readline exports the width that it finds, to processes such as those of pytest -n."""
    monkeypatch.delenv("COLUMNS", raising=False)
