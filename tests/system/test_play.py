"""Figures that a reader can play with: of stored runs, drawn without a network, and a click leads to a claim's rows."""

import importlib.util
import json
import re
from pathlib import Path

import pandas as pd
import pytest
import vl_convert

from fedlib_lab.report.claims_page import counts_of
from tests.helpers.browser import chromium, unavailable
from tests.helpers.tracked import OUTPUTS

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("play", ROOT / "docs/play.py")
play = importlib.util.module_from_spec(spec)
spec.loader.exec_module(play)


def drawn(chart):
    return json.loads(chart.to_json()), vl_convert.vegalite_to_svg(chart.to_json())


def test_every_claim_of_the_pages_is_a_tile_that_leads_to_its_rows():
    claims = play.claims(OUTPUTS)
    tally = counts_of(re.search(r"of \d+ claims .*?\.", (OUTPUTS / "README.md").read_text())[0])
    found = claims.verdict.value_counts()
    assert {verdict: int(found.get(verdict, 0)) for verdict in tally} == tally
    for link in claims.link:
        page, _, place = link.removeprefix("../outputs/").partition("#")
        text = (OUTPUTS / page.replace(".html", ".md")).read_text()
        assert not place or f"\n## {place}\n" in text, link
    _, svg = drawn(play.claims_chart(claims))
    assert svg.count("<a ") == len(claims)


def test_costs_and_curves_are_of_the_chosen_data():
    where = {"rounds": 100, "key": "reefl", "method": "ReeFL"}
    rows = pd.DataFrame([{**where, "setting": f"{d}, DeiT-micro, LoRA", "accuracy": a, "runs": 3, "macs": 2.0, "training_memory_mib": 5.0,
                          "upload_mib": 0.5, "t": t} for d, a, t in (("CIFAR-10", 40.0, 50), ("CIFAR-10", 44.0, 100), ("SST-2", 70.0, 100))])  # fmt: skip
    for chart, dots in ((play.costs_chart(rows), 2), (play.curves_chart(rows), 2)):
        said, svg = drawn(chart)
        assert svg.count('aria-roledescription="point"') + svg.count('aria-roledescription="circle"') == dots
        lists = [p["bind"]["options"] for p in said["params"] if "options" in p.get("bind", {})]
        assert lists[0] == ["CIFAR-10, DeiT-micro, LoRA", "SST-2, DeiT-micro, LoRA"] and "http" not in json.dumps(
            said["encoding"]
        )


def test_methods_of_a_reader_s_own_have_no_known_costs():
    own = [{"setting": "digits", "method": m, "key": m, "rounds": 2, "accuracy": 10.0, "run": m} for m in "abcdef"]
    assert play.with_costs(pd.DataFrame(own)).empty


def test_who_is_over_a_cap_is_left_out_of_the_atlas():
    costs = {
        "peak MiB": 5.0,
        "upload MiB": 0.1,
        "seconds a round": 0.2,
        "seeds": 1,
        "where": "CIFAR-10, compute was capped",
    }
    rows = pd.DataFrame([{**costs, "label": "DepthFL", "method": "depthfl", "score": 40.0, "macs": 2.0},
                         {**costs, "label": "HeteroFL", "method": "heterofl", "score": 30.0, "macs": 1.0}])  # fmt: skip
    said, svg = drawn(play.atlas_chart(rows))
    assert svg.count('aria-roledescription="bar"') == 2
    next(p for p in said["params"] if p["name"] == "cap0")["value"] = 1.5
    assert vl_convert.vegalite_to_svg(json.dumps(said)).count('aria-roledescription="bar"') == 1
    stored = play.atlas(OUTPUTS)
    assert len(stored) == len(stored[["where", "label", "method"]].drop_duplicates()) > 10 and stored.notna().all(
        axis=None
    )


def test_without_runs_there_are_figures_without_dots(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    play.write(tmp_path / "play")
    names = {"vega.js", *(f"{n}.{kind}" for n in ("costs", "curves", "claims", "atlas") for kind in ("js", "png"))}
    assert {p.name for p in (tmp_path / "play").iterdir()} == names


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_figures_are_drawn_beside_the_site_s_own_scripts(tmp_path, monkeypatch):
    """Sphinx's scripts have a global `_`, and so have Vega's: each must keep its own."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    play.write(tmp_path / "play")
    scripts = "".join(f'<script src="play/{name}.js"></script>' for name in ("vega", "costs"))
    (tmp_path / "page.html").write_text(f'<script>const _ = 1;</script><div id="costs"></div>{scripts}')
    with chromium() as driver:
        driver.get((tmp_path / "page.html").as_uri())
        assert driver.execute_script("return [typeof vegaEmbed, _]") == ["function", 1]
