"""The check that CI ends with: browser tests must have run and passed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parent.parent / ".ci" / "check_report.py"
PASSED = '<testcase classname="tests.test_app" name="test_click[a/b::c]" time="1"/>'
SKIPPED = PASSED.replace("/>", '><skipped message="no Chromium"/></testcase>')
FAILED = PASSED.replace("/>", '><failure message="no"/></testcase>')
ID = "tests/test_app.py::test_click[a/b::c]\n"


@pytest.mark.parametrize(
    ("case", "ids", "complaint"),
    [
        (PASSED, ID, ""),
        (PASSED + PASSED, ID, ""),
        (PASSED + FAILED, ID, "browser tests that did not pass: tests/test_app.py::test_click"),
        (SKIPPED, ID, "browser tests that did not pass: tests/test_app.py::test_click"),
        ("", ID, "browser tests that did not pass: tests/test_app.py::test_click"),
        (PASSED, "no tests collected\n", "there is no browser test"),
    ],
)
def test_browser_tests_must_have_passed(tmp_path: Path, case: str, ids: str, complaint: str) -> None:
    report, listed = tmp_path / "report.xml", tmp_path / "ids.txt"
    suite = f'<testsuite tests="1" failures="0" errors="0" skipped="0" time="1.5">{case}</testsuite>'
    report.write_text(f"<testsuites>{suite}</testsuites>", encoding="utf-8")
    listed.write_text(ids, encoding="utf-8")
    done = subprocess.run([sys.executable, CHECK, report, listed], capture_output=True, text=True, check=False)
    assert done.returncode == bool(complaint)
    assert complaint in done.stderr
    assert "1 tests, 0 failures" in done.stdout
    assert f"{max(0, case.count('<testcase') - 1)} run again" in done.stdout
