"""Models of every architecture whose headers were changed: each loads and answers, or is refused in one clear sentence.

The mutants run in a child process with limits (`fuzz_models.py`, which also runs by hand for longer).
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from golden_models import described

HERE = Path(__file__).parent
FIRST, COUNT = 0, 15
MOST_SECONDS, MOST_MIB = 30, 1500  # of computing, a kernel or two compiled; resident
SOME = [list(described())[i::3] for i in range(3)]


def limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.parametrize("names", SOME, ids=lambda names: names[0])
def test_mutants_answer_or_are_refused(names):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "fuzz_models.py"), folder, str(FIRST), str(COUNT), *names]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=limits, check=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, f"the interpreter ended at {lines[-1:]}: {ran.stderr[-2000:]}"
    mutants, ends = lines[::2], lines[1::2]
    assert len(ends) == len(mutants) == COUNT * len(names)
    for mutant, found in zip(mutants, ends, strict=True):
        assert found["end"].startswith(("loaded", "refused: ")), (mutant, found["end"])
        assert "\n" not in found["end"], (mutant, found["end"])
        assert found["seconds"] < MOST_SECONDS, (mutant, found)
    assert ends[-1]["mib"] < MOST_MIB
    outcomes = {found["end"].split(":")[0] for found in ends}
    assert outcomes == {"loaded", "refused"}, "some mutations are harmless, and some are not"
