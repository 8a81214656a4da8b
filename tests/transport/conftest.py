"""Runs tests that take `kind` with each transport; those marked `libcurl` need TLS, a proxy or libcurl's own parts."""

from __future__ import annotations

import pytest

from tests.support.transports import KINDS, Current, Kind


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("libcurl")
        names = ["libcurl"] if only else list(KINDS)
        metafunc.parametrize("kind", [KINDS[name] for name in names], ids=names)


@pytest.fixture
def each_kind(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Current, "kind", kind)
