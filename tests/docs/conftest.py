"""The documentation site, built once for a process."""

import os
import subprocess
import sys

import pytest

from tests.conftest import CONF
from tests.docs.site import Site

NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # nobody listens


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    pytest.importorskip("mkdocs", reason="needs mkdocs (pip install 'simbal[docs]')")
    folder = tmp_path_factory.mktemp("documentation") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | NO_NETWORK | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=CONF.parent, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return Site(folder)
