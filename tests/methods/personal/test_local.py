"""Local training: nothing travels."""

from tests.helpers.plain_personal import World, close, moved, two_rounds


def test_local():
    w = World("local")
    own = [w.initial] * 3
    for t in (1, 2):
        own = [w.train(own[k], k, t) for k in w.clients]
    server, memories, mirrors = two_rounds(w)
    close(server.params, w.initial, 0)
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items()})
        assert moved(own[k], w.initial) > 0.01
    assert not mirrors
