"""Fail where a browser test did not pass: python .ci/check_report.py REPORT IDS

REPORT is pytest's JUnit XML; IDS holds the ids of the browser tests, one a line, as `pytest --collect-only -q` prints them.
A test that was run again stands in the report once for each try; only the last one tells whether it failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(report: str, ids: str) -> str | None:
    """Print the totals; return what is wrong, or None."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        return f"{report} holds no test suite"
    tries = [(f"{case.get('classname')}.{case.get('name')}", _passed(case)) for case in suite.iter("testcase")]
    last = dict(tries)
    wanted = [line for line in Path(ids).read_text(encoding="utf-8").splitlines() if "::" in line]
    missing = [line for line in wanted if not last.get(_dotted(line))]
    totals = ", ".join(f"{suite.get(key)} {key}" for key in ("tests", "failures", "errors", "skipped"))
    again = len(tries) - len(last)
    seconds = float(suite.get("time", "0"))
    browser = f"{len(wanted) - len(missing)} of {len(wanted)} in the browser"
    sys.stdout.write(f"{totals}; {browser}; {again} run again; {seconds:.0f} s\n")
    if not wanted:
        return "there is no browser test"
    return f"browser tests that did not pass: {', '.join(missing)}" if missing else None


def _passed(case: ElementTree.Element) -> bool:
    return not {child.tag for child in case} & {"skipped", "failure", "error"}


def _dotted(node_id: str) -> str:
    """tests/test_a.py::test_b[c] → tests.test_a.test_b[c], as JUnit XML names it."""
    path, _, rest = node_id.partition("::")
    test, bracket, parameters = rest.partition("[")
    return f"{path.removesuffix('.py').replace('/', '.')}.{test.replace('::', '.')}{bracket}{parameters}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
