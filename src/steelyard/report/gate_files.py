"""What a gate found, for a CI system's test page and for a pull request."""

from __future__ import annotations

from steelyard.report.gate import Gated
from steelyard.report.junit import attribute, content
from steelyard.report.markdown import code, markdown_table
from steelyard.report.rules import Checked
from steelyard.stats.wording import safe_text

_LONGEST = 400


def gate_lines(checks: list[Checked], *, mark: bool) -> str:
    """A line for each rule, safe for a terminal; `mark` says for each whether it is kept."""
    signs = {True: "ok      ", False: "broken  "} if mark else {True: "", False: ""}
    return "\n".join(f"{signs[check.ok]}{safe_text(check.rule)}: {safe_text(check.reason)}" for check in checks)


def gate_markdown(gated: Gated) -> str:
    """The verdict and a table of the rules; what else is different from the baseline is folded."""
    broken = len(gated.broken)
    verdict = "✅ gate passed" if gated.passed else f"❌ gate failed: {broken:,} of {len(gated.checks):,} broken"
    named = " on ".join(code(name, 60) for name in (gated.suite, gated.model_id) if name)
    against = "" if gated.baseline is None else f", against {code(gated.baseline)}"
    ordered = [*gated.broken, *(check for check in gated.checks if check.ok)]
    checks = markdown_table(
        ["", "rule", "found"],
        (["✅" if check.ok else "❌", code(check.rule), code(check.reason, _LONGEST)] for check in ordered),
    )
    parts = [f"### {verdict}", f"{named}: {code(gated.run)}{against}", checks]
    if gated.notes:
        listed = "\n".join(f"- {code(note, _LONGEST)}" for note in gated.notes)
        parts.append(f"<details><summary>What else is different</summary>\n\n{listed}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def gate_junit(gated: Gated, timestamp: str) -> str:
    """A test suite with a test case for each rule; `timestamp` is when, in UTC to the second."""
    name = attribute(f"steelyard gate: {gated.suite}")
    head = (
        f'<testsuite name={name} package={name} id="0" timestamp={attribute(timestamp)} hostname="localhost" '
        f'tests="{len(gated.checks)}" failures="{len(gated.broken)}" errors="0" skipped="0" time="0">'
    )
    cases = "\n".join(_case(check, gated.suite) for check in gated.checks)
    properties = "".join(
        f"\n      <property name={attribute(key)} value={attribute(value)}/>"
        for key, value in (("run", gated.run), ("baseline", gated.baseline), ("model_id", gated.model_id))
        if value is not None
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<testsuites>\n'
        f"  {head}\n    <properties>{properties}\n    </properties>\n{cases}\n"
        "    <system-out/>\n    <system-err/>\n  </testsuite>\n</testsuites>\n"
    )


def _case(check: Checked, suite: str) -> str:
    opening = f'    <testcase name={attribute(check.rule)} classname={attribute(f"gate.{suite}")} time="0"'
    if check.ok:
        return f"{opening}/>"
    said = f"{check.rule}: {check.reason}"
    return (
        f'{opening}><failure type="broken rule" message={attribute(check.reason)}>{content(said)}</failure></testcase>'
    )
