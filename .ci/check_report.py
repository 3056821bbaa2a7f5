"""Fail where the browser tests did not run: python .ci/check_report.py REPORT (pytest's JUnit XML)."""

from __future__ import annotations

import sys
from xml.etree import ElementTree


def main(path: str) -> str | None:
    """Print the summary line; return what is wrong, or None."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    if suite is None:
        return f"{path} holds no test suite"
    cases = [case for case in suite.iter("testcase") if "browser" in case.get("classname", "")]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    totals = ", ".join(f"{suite.get(key)} {key}" for key in ("tests", "failures", "errors", "skipped"))
    sys.stdout.write(f"{totals}; {len(cases)} in the browser, in {float(suite.get('time', '0')):.0f} s\n")
    if not cases:
        return "no browser test ran"
    return f"browser tests were skipped: {', '.join(map(str, skipped))}" if skipped else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
