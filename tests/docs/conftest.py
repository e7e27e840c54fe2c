"""The documentation site, built once for all workers; mkdocs --strict fails for a broken link or anchor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.conftest import CONF

NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # refuses connections


@pytest.fixture(scope="session")
def site(tmp_path_factory, worker_id) -> Path:
    pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'simbal[docs]')")
    base = tmp_path_factory.getbasetemp()
    folder: Path = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", f"{folder}.part"]
            env = os.environ | NO_NETWORK | {"NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=CONF.parent, env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
            Path(f"{folder}.part").rename(folder)
    return folder
