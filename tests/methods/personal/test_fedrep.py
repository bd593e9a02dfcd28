"""FedRep against a plain loop."""

from tests.helpers.plain_personal import World, close, is_exit, two_rounds


def test_fedrep():
    w = World("fedrep", options={"head_epochs": 3})
    phi, own = w.initial, [w.initial] * 3
    for t in (1, 2):
        for k in w.clients:
            p = {n: (own[k] if is_exit(n) else phi)[n] for n in phi}
            own[k] = w.train(w.train(p, k, t, which=is_exit, epochs=3), k, t, which=lambda n: not is_exit(n))
        phi = {**phi, **w.mean(own, lambda n: not is_exit(n))}
    server, memories, _ = two_rounds(w)
    close(server.params, phi)
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items() if is_exit(n)})
