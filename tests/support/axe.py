"""The accessibility rules of axe-core, run on a page; skipped where npm has not installed it (`make node`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_SCRIPT = Path(__file__).parent.parent.parent / ".venv/node/node_modules/axe-core/axe.min.js"
_RULES = ["wcag2a", "wcag2aa"]
_ALSO = ["empty-table-header", "page-has-heading-one", "heading-order", "scope-attr-valid"]


def violations(page: Page) -> list[str]:
    """What the page does against WCAG 2 A and AA, and a few good practices: a line for each rule and element."""
    if not _SCRIPT.is_file():
        pytest.skip("no accessibility check: axe-core is not installed (`make node` does, where there is npm)")
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(_SCRIPT.read_text(encoding="utf-8"))
    found = page.evaluate(
        """async ([tags, rules]) => {
            const enabled = Object.fromEntries(rules.map((rule) => [rule, { enabled: true }]));
            const result = await axe.run({ runOnly: { type: "tag", values: tags }, rules: enabled });
            return result.violations.flatMap((one) => one.nodes.map((node) =>
                `${one.id}: ${node.target.join(" ")}: ${node.failureSummary}`));
        }""",
        [_RULES, _ALSO],
    )
    return list(found)
