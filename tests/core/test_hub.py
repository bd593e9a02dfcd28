"""Whether a hub answers is asked once."""

import pytest

from fedlib.core import hub


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch):
    import time

    from huggingface_hub import constants

    from fedlib.models.registry import build_backbone

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_is_reachable", lambda endpoint: asked.append(endpoint))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it tries again"))
    for name in ("vim_tiny", "deit_tiny_patch16_224.fb_in1k"):
        with pytest.raises(ConnectionError, match="not cached and could not be downloaded: connect once"):
            build_backbone(name)
    assert len(asked) == 2
    assert constants.HF_HUB_OFFLINE is False


def test_whether_the_hub_answers():
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        assert hub._is_reachable(address)
    server.shutdown()
    server.server_close()
    assert not hub._is_reachable(address)
