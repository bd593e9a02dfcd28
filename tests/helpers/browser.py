"""Headless Chromium for tests, and the checker of a folder of pages: ``python -m tests.helpers.browser outputs/site``."""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--window-size=1400,1800")  # fmt: skip
LOCAL = ("file:", "data:", "blob:", "about:", "chrome:", "chrome-untrusted:")  # the last two: its own first tab


def unavailable() -> str:
    """Why no test can drive a browser here; empty if one can."""
    if not all(map(shutil.which, ("chromium", "chromedriver"))):
        return "Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (extra `dev`)"
    return ""


@contextmanager
def chromium():
    """A driver of a fresh headless Chromium, closed whatever happens; its profile is thrown away."""
    from selenium import webdriver

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            driver.set_page_load_timeout(60)
            yield driver
        finally:
            driver.quit()


def requests(driver) -> list[str]:
    """The address of every request since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [p["request"]["url"] for p in sent]


def open_page(driver, page: Path) -> None:
    """Open ``page`` and wait until it is whole: ``driver.get`` alone now and then comes back before all is read."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(page.as_uri())
    whole = "return document.readyState == 'complete' && location.href == arguments[0]"
    WebDriverWait(driver, 60).until(lambda d: d.execute_script(whole, page.as_uri()))


def check_pages(driver, folder: Path, names: Sequence[str] = ()) -> tuple[dict[str, int], list[str]]:
    """Open every page of ``folder``, or these: counts of pages, images, links, requests; and what is broken, in words."""
    folder, counts, broken, ids = folder.resolve(), dict.fromkeys(("pages", "images", "links", "requests"), 0), [], {}
    pages, wanted = [folder / n for n in names] or sorted(folder.rglob("*.html")), []
    for page in pages:
        open_page(driver, page)
        images = driver.execute_script("return [...document.images].map(i => [i.src.slice(0, 200), i.naturalWidth])")
        links = driver.execute_script("return [...document.querySelectorAll('a[href]')].map(a => a.href)")
        ids[page] = set(driver.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)"))
        sent = requests(driver)
        broken += [f"{page.name}: image {src} does not load" for src, width in images if not width]
        broken += [f"{page.name}: asks for {url}" for url in sent if not url.startswith(LOCAL)]
        wanted += [(page, urlsplit(link)) for link in links if link.startswith("file:")]
        for name, found in (("pages", [1]), ("images", images), ("links", links), ("requests", sent)):
            counts[name] += len(found)
    for page, link in wanted:
        target, fragment = Path(unquote(link.path)), unquote(link.fragment)
        if not target.exists() or folder not in (target, *target.parents):
            broken.append(f"{page.name}: link to {target}, which is not of the site")
        elif fragment and target in ids and fragment not in ids[target]:
            broken.append(f"{page.name}: link to {target.name}#{fragment}, which has no such place")
    return counts, broken


if __name__ == "__main__":
    with chromium() as opened:
        seen, problems = check_pages(opened, Path(sys.argv[1]))
    print(seen, *problems, sep="\n")
    sys.exit(bool(problems))
