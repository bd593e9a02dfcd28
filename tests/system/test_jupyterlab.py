"""JupyterLab for real: a server, a browser, Run All Cells from the menu, and what a reader then sees."""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.browser import chromium, unavailable

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds on a machine that is busy with other things; about 25 on one that is not
SETTINGS = {  # no question about news, and every cell in the page, in view or not
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
}
STATE = """
const cells = [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')];
const images = [...document.querySelectorAll('.jp-OutputArea-output img')];
const last = cells.length ? cells[cells.length - 1] : null;
return {
  prompts: cells.map(c => c.querySelector('.jp-InputPrompt').innerText.trim()),
  images: images.map(i => i.naturalWidth),
  table: last ? [...last.querySelectorAll('.jp-OutputArea-output table')].map(t => t.innerText).join() : '',
  errors: [...document.querySelectorAll('.jp-OutputArea-output')].map(o => o.innerText).filter(t => t.includes('Traceback')),
};
"""


def wait_for(what, condition, seconds=PATIENCE):
    """Poll until ``condition()`` is true, and return it; AssertionError names ``what`` and the last value.

    A server that does not answer, or answers 500 while a kernel starts, is asked again.
    """
    end, value = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except OSError as error:
            value = error
        time.sleep(0.3)
    raise AssertionError(f"waited {seconds} s for {what}; last: {value}")


def ask(server, path, method="GET"):
    request = urllib.request.Request(f"{server['url']}{path}", method=method, headers={"Authorization": f"token {server['token']}"})  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or "null")


@contextmanager
def jupyterlab(folder, arguments=()):
    """A server on a free port of the loopback with a random token, and nothing of the user's own configuration.

    It serves ``folder / "notebooks"`` if no ``arguments`` say what.
    """
    shutil.copytree(ROOT / "notebooks/walkthrough", folder / "notebooks")
    arguments = arguments or [f"--ServerApp.root_dir={folder / 'notebooks'}"]
    for name, value in SETTINGS.items():
        (folder / "settings" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "settings" / name).write_text(json.dumps(value))
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython",
           "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "FEDLIB_OUTPUTS": "outputs"}  # fmt: skip
    env = {**os.environ, "FEDLIB_ROOT": str(ROOT), **{k: str(folder / v) for k, v in own.items()}}
    env.pop("JUPYTER_PATH", None)  # a kernel of its own, as a user has it
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
               "--port=0", f"--IdentityProvider.token={secrets.token_hex(16)}", *arguments]  # fmt: skip
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    server = None
    try:

        def started():
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            return list((folder / "runtime").glob("jpserver-*.json"))

        server = json.loads(wait_for("the server", started)[0].read_text())
        wait_for("an answer of the server", lambda: ask(server, "api/status"))
        yield server
    finally:
        try:
            for kernel in ask(server, "api/kernels") if server else ():
                ask(server, f"api/kernels/{kernel['id']}", "DELETE")
        except OSError:
            pass  # a server that ends takes its kernels along
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def run_all_cells(driver):
    """Menu Run, entry Run All Cells."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    menu = "//li[contains(@class, 'lm-MenuBar-item')][.//div[normalize-space()='Run']]"
    entry = "//li[@data-command='runmenu:run-all']"

    def opened():
        if not (found := [e for e in driver.find_elements(By.XPATH, entry) if e.is_displayed()]):
            ActionChains(driver).click(driver.find_element(By.XPATH, menu)).pause(0.5).perform()
        return found

    ActionChains(driver).click(wait_for("the menu", opened)[0]).perform()


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_the_walkthrough_runs_in_jupyterlab(tmp_path):
    with jupyterlab(tmp_path) as server, chromium() as driver:
        driver.get(f"{server['url']}lab/tree/00_start_here.ipynb?token={server['token']}&reset")
        state = lambda: driver.execute_script(STATE)  # noqa: E731
        cells = json.loads((ROOT / "notebooks/walkthrough/00_start_here.ipynb").read_text())["cells"]
        code = sum(c["cell_type"] == "code" for c in cells)
        wait_for("the notebook", lambda: len(state()["prompts"]) == code)
        wait_for("an idle kernel", lambda: [k for k in ask(server, "api/kernels") if k["execution_state"] == "idle"])
        assert set(state()["prompts"]) == {"[ ]:"} and not state()["images"]  # nothing is there before
        run_all_cells(driver)

        def ended():
            now = state()
            assert not now["errors"], now["errors"][0][-2000:]
            return now if all(re.fullmatch(r"\[\d+\]:", p) for p in now["prompts"]) else None

        seen = wait_for("all cells", ended)
        assert "every run is clearly above chance" in seen["table"] and "not testable at this profile" in seen["table"]
        assert len(seen["images"]) >= 3 and all(width > 300 for width in seen["images"])
        last = driver.execute_script("return [...document.querySelectorAll('.jp-OutputArea-output img')].pop()")
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", last)
        assert driver.save_screenshot(str(tmp_path / "jupyterlab.png"))
        assert len(list((tmp_path / "outputs/walkthrough/figures").glob("start_here_smoke_*.png"))) == 3
    assert not list((tmp_path / "runtime").glob("jpserver-*.json"))  # the server has left in good order


def test_make_lab_opens_the_first_notebook_and_serves_what_make_demo_names(tmp_path):
    """Whatever folder it is called from, and in whatever folder a user's own configuration starts."""
    makefile = (ROOT / "Makefile").read_text()
    (given,) = re.findall(r"^lab:.*\n\t\$\(BIN\)/jupyter lab (.*)$", makefile, re.M)
    (said,) = re.findall(r"^demo:(?:.*\n\t)+@echo (.*open both with: make lab)", makefile, re.M)
    named = [*re.findall(r"(outputs|\$\(EXECUTED\))/", said)]
    assert len(named) == 2 and re.search(r"^EXECUTED := outputs/", makefile, re.M)
    with jupyterlab(tmp_path, shlex.split(given.replace("$(CURDIR)", str(ROOT)))) as server:
        start = ask(server, "api/contents/notebooks/walkthrough/00_start_here.ipynb?content=0")
        assert start["type"] == "notebook" and ask(server, "api/contents/outputs/README.md?content=0")["writable"]
        with urllib.request.urlopen(f"{server['url']}?token={server['token']}", timeout=30) as first:
            assert first.url.split("?")[0] == f"{server['url']}lab/tree/notebooks/walkthrough/00_start_here.ipynb"
