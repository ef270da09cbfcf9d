"""Who waits for a lock with another in hand can wait for ever: nobody does without a directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_no_thread_of_a_server_under_load_takes_a_lock_while_it_has_another(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "lock_watch.py"), str(tmp_path)],
        env={"PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr
